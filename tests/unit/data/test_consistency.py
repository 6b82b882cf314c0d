"""One sum over all ranks finds tensor-parallel ranks that hold different samples."""

import pytest
import torch

from ds_trainer.data.consistency import batch_digest, check_same_batches, digest_term
from ds_trainer.errors import DataError
from ds_trainer.launch.rank_grid import Grid

BATCH = {"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.ones(2, 3, dtype=torch.bool), "names": ["a"]}


def changed(**tensors):
    return BATCH | tensors


def total(digests, tp):
    return sum(digest_term(own, Grid(world=len(digests), rank=rank, tp_size=tp)) for rank, own in enumerate(digests))


def test_a_digest_follows_from_every_value():
    grid = Grid(world=2, tp_size=2)
    own = batch_digest([BATCH], grid)
    assert own == batch_digest([dict(reversed(BATCH.items()))], grid)
    ids = BATCH["input_ids"].clone()
    ids[1, 2] += 1
    others = [
        [changed(input_ids=ids)],
        [changed(attention_mask=BATCH["attention_mask"].logical_not())],
        [changed(names=["b"])],
        [changed(scale=torch.tensor(1.0))],
        [BATCH, BATCH],
    ]
    assert len({own, *(batch_digest(batches, grid) for batches in others)}) == 6


def test_without_tensor_parallelism_nothing_is_hashed():
    assert batch_digest([BATCH], Grid(world=2)) == 0


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_the_sum_is_zero_only_where_each_group_has_one_digest(tp):
    largest = 2**40 - 1
    same = [largest] * tp + [7] * tp
    assert total(same, tp) == 0
    for rank in range(2 * tp):
        other = list(same)
        other[rank] -= 1
        assert total(other, tp) != 0


@pytest.mark.case("I5")
def test_the_error_names_the_ranks_and_both_hashes():
    class Gathered:
        grid = Grid(world=4, tp_size=2)

        def gather_over_world(self, own):
            return [1, 1, 2, 255]

    with pytest.raises(DataError) as error:
        check_same_batches(-253.0, 1, Gathered(), "step 3")
    assert error.value.on_all_ranks
    assert "step 3: ranks that share one copy" in str(error.value)
    assert "rank 2: hash 0000000002, rank 3: hash 00000000ff" in str(error.value)
