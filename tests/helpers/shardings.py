"""Every kind of sharding, of tensors of one to three dimensions."""

from ds_trainer.layout import TensorSharding

SHARDINGS = {
    "columns": TensorSharding.even((8, 6), 0, 2),
    "rows": TensorSharding.even((3, 8), 1, 4),
    "packed": TensorSharding.even((6, 5), 0, 2, parts=(2, 4)),
    "packed rows of a three-dimensional tensor": TensorSharding.even((2, 3, 12), 2, 3, parts=(6, 3, 3)),
    "middle": TensorSharding.even((3, 8, 5), 1, 2, parts=(4, 4)),
    "padded": TensorSharding.padded((7, 3), 4),
    "padded by more than a rank": TensorSharding.padded((5, 2), 4),
    "padded vector": TensorSharding.padded((65,), 2),
    "copies": TensorSharding.repeated((6, 4), 0, 4, units=2),
    "copies of one": TensorSharding.repeated((4, 6), 1, 3, units=1),
}
