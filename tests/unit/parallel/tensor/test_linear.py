"""Column and row layers compute what the whole layer does, forward and backward, however the weight is cut."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.collectives import gather_sequence, scatter_sequence
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, column_bias_sharding
from ds_trainer.parallel.tensor.replicated_shards import ReplicatedShards
from tests.helpers.table import table
from tests.helpers.threads import Communication, fill, local_part, on_threads

B, T, IN, D = 2, 5, 12, 24
SIZES = [2, 3, 4]
KINDS = ["linear", "conv1d"]
# Of a tensor's largest element. fp32: the order of sums. bf16 keeps 8 bits, and rounds each rank's part of a sum.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}


def assert_close(got, expected):
    difference = (got.double() - expected.double()).abs().max()
    assert difference <= TOLERANCE[got.dtype] * expected.double().abs().max(), difference
    assert got.shape == expected.shape


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_dense(kind, outputs=D, dtype=torch.float32, inputs=IN):
    """A whole layer whose bias is not zero."""
    layer = nn.Linear(inputs, outputs) if kind == "linear" else Conv1D(outputs, inputs)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = random(*parameter.shape, seed=seed)
    return layer.to(dtype)


def column_sharding(name, layer, size):
    shape = tuple(layer.weight.shape)
    dim = int(isinstance(layer, Conv1D))
    if name == "packed":
        return TensorSharding.even(shape, dim, size, (D // 2, D // 4, D // 4) if size < 4 else (D // 3,) * 3)
    if name == "repeated":
        return TensorSharding.repeated(shape, dim, size, {2: 1, 3: 1, 4: 2}[size])
    if name == "queries cut, one key and value head on all":
        queries = [(D // 2 * r // size, D // 2 * (r + 1) // size) for r in range(size)]
        return TensorSharding(shape, dim, tuple((pair, (D // 2, D)) for pair in queries), D // 2 // size + D // 2)
    return TensorSharding.even(shape, dim, size)


SHARDINGS = ["even", "packed", "repeated", "queries cut, one key and value head on all"]


def column_on_rank(group, dense, sharding, x, grads):
    """Output, and gradients of input, weight and bias, where each rank's output has a gradient of its own."""
    layer = ColumnParallelLinear.from_module(dense, sharding, group)
    fill(layer, dense, weight=sharding, bias=column_bias_sharding(sharding))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grads[group.rank()])
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@table("size", SIZES)
@table("dtype", TOLERANCE)
@table("kind", KINDS)
@table("name", SHARDINGS)
def test_a_column_layer_is_its_part_of_the_whole_layer(name, kind, dtype, size):
    dense = make_dense(kind, dtype=dtype)
    sharding = column_sharding(name, dense, size)
    outputs = TensorSharding((B, T, D), 2, sharding.ranges, sharding.length)
    grads = [random(B, T, sharding.length, seed=10 + rank, dtype=dtype) for rank in range(size)]
    x = random(B, T, IN, seed=5, dtype=dtype).requires_grad_()
    y = dense(x)
    # Copies of an output add up: each rank computes with its own.
    parts = [local_part(y, outputs, rank) for rank in range(size)]
    ranks = on_threads(column_on_rank, size, dense, sharding, x.detach(), grads)
    sum((part.double() * grad).sum() for part, grad in zip(parts, grads, strict=True)).backward()
    for rank, (got, of_x, of_weight, of_bias) in enumerate(ranks):
        assert_close(got, parts[rank])
        assert_close(of_x, x.grad)
        assert_close(of_weight, local_part(dense.weight.grad, sharding, rank))
        assert_close(of_bias, local_part(dense.bias.grad, column_bias_sharding(sharding), rank))


def test_copies_stay_equal_to_the_bit_for_one_more_sum(monkeypatch):
    dense, communication = make_dense("linear"), Communication(monkeypatch)
    sharding = column_sharding("repeated", dense, 4)
    assert ReplicatedShards.of(sharding, 2) == ReplicatedShards(0, ((0, D // 2, D // 2),), D)
    grads = [random(B, T, sharding.length, seed=10 + rank) for rank in range(4)]
    ranks = on_threads(column_on_rank, 4, dense, sharding, random(B, T, IN, seed=5), grads)
    for gradient in (2, 3):
        of_ranks = [rank[gradient] for rank in ranks]
        assert torch.equal(of_ranks[0], of_ranks[1]) and torch.equal(of_ranks[2], of_ranks[3])
        assert not torch.equal(of_ranks[0], of_ranks[2])
    payloads = B * T * IN, D * IN, D  # of the input's gradient, the weight's and the bias's
    assert communication.since_last() == [("all-reduce", 4 * numbers) for numbers in payloads]


def gathered_output_on_rank(group, dense, sharding, x, grad):
    layer = ColumnParallelLinear.from_module(dense, sharding, group)
    fill(layer, dense, weight=sharding, bias=column_bias_sharding(sharding))
    layer.gather_output = True
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@table("size", SIZES)
@table("name", [*SHARDINGS, "padded"])
def test_a_gathered_output_is_in_order_without_padding_and_counts_copies_once(name, size):
    dense = make_dense("linear", outputs=23 if name == "padded" else D)
    sharding = TensorSharding.padded((23, IN), size) if name == "padded" else column_sharding(name, dense, size)
    x = random(B, T, IN, seed=5).requires_grad_()
    y = dense(x)
    grad = random(*y.shape, seed=6)
    y.backward(grad)
    for rank, (got, of_x, of_weight, of_bias) in enumerate(
        on_threads(gathered_output_on_rank, size, dense, sharding, x.detach(), grad)
    ):
        assert_close(got, y)
        assert_close(of_x, x.grad)
        assert_close(of_weight, local_part(dense.weight.grad, sharding, rank))
        assert_close(of_bias, local_part(dense.bias.grad, column_bias_sharding(sharding), rank))


def row_on_rank(group, dense, sharding, x, grad, mode):
    layer = fill(RowParallelLinear.from_module(dense, sharding, group), dense, weight=sharding)
    layer.input_is_full = mode == "input is whole"
    layer.sequence_parallel = mode == "sequence parallel"
    x = (
        x.clone()
        if layer.input_is_full
        else local_part(x, TensorSharding(tuple(x.shape), 2, sharding.ranges, sharding.length), group.rank())
    )
    y = layer(x.requires_grad_())
    y.backward(scatter_sequence(grad, group) if layer.sequence_parallel else grad)
    whole = gather_sequence(y.detach(), T, group) if layer.sequence_parallel else y.detach()
    return y.shape[1], whole, x.grad, layer.weight.grad, layer.bias.grad


@table("size", SIZES)
@table("dtype", TOLERANCE)
@table("kind", KINDS)
@table("parts", [None, (8, 4)], ids=["even", "packed"])
@table("mode", ["input is cut", "input is whole", "sequence parallel"])
def test_a_row_layer_is_the_whole_layer(mode, parts, kind, dtype, size):
    if parts is not None and size == 3:
        parts = (9, 3)
    dense = make_dense(kind, dtype=dtype)
    sharding = TensorSharding.even(tuple(dense.weight.shape), int(kind == "linear"), size, parts)
    x = random(B, T, IN, seed=5, dtype=dtype).requires_grad_()
    y = dense(x)
    grad = random(*y.shape, seed=6, dtype=dtype)
    y.backward(grad)
    inputs = TensorSharding((B, T, IN), 2, sharding.ranges, sharding.length)
    for rank, (length, got, of_x, of_weight, of_bias) in enumerate(
        on_threads(row_on_rank, size, dense, sharding, x.detach(), grad, mode)
    ):
        assert length == (-(-T // size) if mode == "sequence parallel" else T)
        assert_close(got, y)
        assert_close(of_x, x.grad if mode == "input is whole" else local_part(x.grad, inputs, rank))
        assert_close(of_weight, local_part(dense.weight.grad, sharding, rank))
        assert_close(of_bias, dense.bias.grad)


def autocast_on_rank(group, first, second, x):
    shardings = TensorSharding.even((D, IN), 0, group.size()), TensorSharding.even((IN, D), 1, group.size())
    column = ColumnParallelLinear.from_module(first, shardings[0], group)
    fill(column, first, weight=shardings[0], bias=column_bias_sharding(shardings[0]))
    row = fill(RowParallelLinear.from_module(second, shardings[1], group), second, weight=shardings[1])
    with torch.autocast("cpu", torch.bfloat16):
        between = column(x)
        y = row(between)
    y.float().square().sum().backward()
    return between.dtype, y.detach(), column.weight.grad, row.bias.grad


def test_under_autocast_the_layers_compute_in_its_format_and_gradients_are_fp32():
    first, second = make_dense("linear"), make_dense("linear", outputs=IN, inputs=D)
    x = random(B, T, IN, seed=5)
    with torch.autocast("cpu", torch.bfloat16):
        y = second(first(x))
    y.float().square().sum().backward()
    for rank, (between, got, of_weight, of_bias) in enumerate(on_threads(autocast_on_rank, 2, first, second, x)):
        assert between == got.dtype == torch.bfloat16
        assert_close(got, y)
        assert of_weight.dtype == of_bias.dtype == torch.float32
        expected = local_part(first.weight.grad, TensorSharding.even((D, IN), 0, 2), rank)
        assert_close(of_weight.bfloat16(), expected.bfloat16())
        assert_close(of_bias.bfloat16(), second.bias.grad.bfloat16())


def frozen_on_rank(group, dense, x):
    sharding = TensorSharding.even((D, IN), 0, group.size())
    layer = ColumnParallelLinear.from_module(dense, sharding, group)
    fill(layer, dense, weight=sharding, bias=column_bias_sharding(sharding))
    x = x.clone().requires_grad_()
    layer(x).sum().backward()
    return x.grad, layer.weight.grad, layer.bias.grad


def test_a_frozen_layer_passes_gradients_on_and_has_none():
    dense = make_dense("linear").requires_grad_(False)
    for of_x, of_weight, of_bias in on_threads(frozen_on_rank, 2, dense, random(B, T, IN, seed=5)):
        assert_close(of_x, dense.weight.sum(0).expand(B, T, IN))
        assert of_weight is None and of_bias is None


def test_training_mode_and_format_are_those_of_the_module():
    def on_rank(group):
        dense = make_dense("linear", dtype=torch.bfloat16).eval()
        layer = ColumnParallelLinear.from_module(dense, TensorSharding.even((D, IN), 0, 2), group)
        return layer.training, layer.weight.dtype, layer.weight.is_meta, (layer.in_features, layer.out_features)

    assert on_threads(on_rank, 2) == [(False, torch.bfloat16, True, (IN, D // 2))] * 2
