"""Layouts that tests train: sections of a config by name, and a model's shape that makes their mechanisms act."""

from __future__ import annotations

# A layer with three matrices of 1M elements and a tied embedding of 1M: at 4 ranks each shard is still 1 MiB in fp32,
# below which DeepSpeed leaves it in memory whatever the config says.
SHAPE = {"hidden": 512, "layers": 1, "vocab": 2051, "intermediate": 2048}
SMALL = {"reduce_bucket_size": 700_000, "allgather_bucket_size": 700_000}
STAGE3 = {
    "stage": 3,
    "reduce_bucket_size": 700_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 300_000,
    "stage3_max_live_parameters": 1_500_000,
    "stage3_max_reuse_distance": 0,
    "sub_group_size": 600_000,
}
CPU = {"offload_optimizer": {"device": "cpu"}}


def deepspeed(**zero) -> dict:
    return {"parallel": {"engine": "deepspeed"}, "zero": zero}


def fsdp2(replicate: int = 1, **fsdp) -> dict:
    return {"parallel": {"engine": "fsdp2", "dp_replicate": replicate}, "fsdp": fsdp}


CELLS = {
    "ddp": {"parallel": {"engine": "ddp"}, "ddp": {"bucket_cap_mb": 1}},
    "zero0": deepspeed(stage=0),
    "zero1": deepspeed(stage=1, **SMALL),
    "zero2": deepspeed(stage=2, **SMALL),
    "zero3": deepspeed(**STAGE3),
    "zero1-cpu": deepspeed(stage=1, **SMALL, **CPU),
    "zero2-cpu": deepspeed(stage=2, **SMALL, **CPU),
    "zero3-cpu": deepspeed(**STAGE3, **CPU),
    "zero3-cpu-params": deepspeed(**STAGE3, **CPU, offload_param={"device": "cpu"}),
    "fsdp2": fsdp2(),
    "fsdp2-keep": fsdp2(reshard_after_forward=False),
    # On the CPU it moves nothing: this is the wiring alone.
    "fsdp2-offload": fsdp2(cpu_offload=True, pin_memory=False),
}
OF_FOUR = {"fsdp2-hsdp": fsdp2(replicate=2), "fsdp2-number": fsdp2(reshard_after_forward=2)}
"""Layouts that need four ranks."""


def with_tensor_ranks(cell: str, **parallel) -> dict:
    """The sections of a cell, with two tensor-parallel ranks beside its own."""
    sections = CELLS[cell]
    return sections | {"parallel": sections["parallel"] | {"tp": 2} | parallel}
