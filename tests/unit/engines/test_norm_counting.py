"""What counts in the gradient norm of a split model: every element of a full tensor once, whoever holds it."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.engines.deepspeed.mpu import counts_in_norm
from ds_trainer.engines.introspect import measured_tp_size
from ds_trainer.errors import EngineError
from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.model_split import ModelSplit
from tests.helpers.table import table

# Query heads 0-3 of width 2 and their only KV head, packed in 10 rows: each of 2 ranks has two query heads, both have
# the KV head.
PACKED = TensorSharding((10, 3), 0, (((0, 4), (8, 10)), ((4, 8), (8, 10))), 6)
SHARDINGS = {
    "rows": TensorSharding.even((8, 3), 0, 2),
    "columns": TensorSharding.even((3, 8), 1, 2),
    "gate and up": TensorSharding.even((8, 3), 0, 2, (4, 4)),
    "an odd vocabulary": TensorSharding.padded((7, 3), 2),
    "one kv head": TensorSharding.repeated((4, 3), 0, 2, 1),
    "two kv heads on four ranks": TensorSharding.repeated((4, 3), 0, 4, 2),
    "packed with the only kv head": PACKED,
    "packed the other way round": TensorSharding((3, 10), 1, PACKED.ranges, 6),
}


def local(sharding: TensorSharding, rank: int, full: torch.Tensor) -> torch.Tensor:
    own = full.new_zeros(sharding.local_shape)
    at = 0
    for start, stop in sharding.ranges[rank]:
        own.narrow(sharding.dim, at, stop - start).copy_(full.narrow(sharding.dim, start, stop - start))
        at += stop - start
    return own


@pytest.mark.case("G6", "I1")
@table("name", SHARDINGS)
@table("shards", [1, 2, 3])
def test_each_element_counts_on_one_rank(name, shards):
    sharding = SHARDINGS[name]
    full = torch.arange(1.0, 1 + torch.Size(sharding.shape).numel()).view(sharding.shape)
    seen = []
    for rank in range(len(sharding.ranges)):
        split = ModelSplit({"w": sharding}, rank)
        own = local(sharding, rank, full)
        for shard in range(shards):  # As FSDP2 cuts it by rows.
            rows = -(-own.shape[0] // shards)
            part = own[shard * rows : (shard + 1) * rows]
            seen += [view.flatten() for view in split.counted("w", part, shard * rows)]
    assert sorted(torch.cat(seen).tolist()) == full.flatten().tolist()


def test_the_tensor_ranks_of_a_model_are_those_over_which_each_planned_parameter_is_really_cut():
    split = ModelSplit({"a": SHARDINGS["rows"], "b": SHARDINGS["an odd vocabulary"]})
    a, b, whole = torch.empty(4, 3), torch.empty(4, 3), torch.empty(7, 3)
    assert measured_tp_size(split, {"a": a, "b": b, "norm": torch.empty(3)}.items()) == 2
    assert measured_tp_size(split, {"a": a, "b": whole}.items()) == 1
    assert measured_tp_size(ModelSplit(), {"norm": torch.empty(3)}.items()) == 1


def test_what_is_not_cut_counts_on_tensor_rank_0():
    gradient = torch.ones(3)
    assert [len(list(ModelSplit(rank=rank).counted("norm", gradient))) for rank in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("name", [name for name in SHARDINGS if "packed" not in name])
def test_deepspeed_is_told_of_whole_parameters(name):
    sharding = SHARDINGS[name]
    told = [counts_in_norm("w", ModelSplit({"w": sharding}, rank)) for rank in range(len(sharding.ranges))]
    assert told == [bool(sharding.first_held(rank)) for rank in range(len(sharding.ranges))]


@pytest.mark.parametrize("rank", [0, 1])
def test_deepspeed_cannot_count_copies_inside_of_a_packed_parameter(rank):
    with pytest.raises(EngineError, match="of qkv each tensor-parallel rank holds a shard and a replica of another"):
        counts_in_norm("qkv", ModelSplit({"qkv": PACKED}, rank))
