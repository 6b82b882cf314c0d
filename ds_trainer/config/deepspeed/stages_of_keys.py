"""At which ZeRO stages DeepSpeed reads a key, and which keys belong to which offload device. Pure.

Source: deepspeed/runtime/engine.py `_configure_zero_optimizer`, runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

STAGES = {
    "overlap_comm": (1, 2, 3),
    "contiguous_gradients": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "round_robin_gradients": (1, 2),
    "allgather_bucket_size": (1, 2),
    "sub_group_size": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "zero_hpz_partition_size": (3,),
    "zero_quantized_weights": (3,),
    "zero_quantized_gradients": (3,),
}
"""Key of the `zero` section -> stages that read it."""

TUNING = tuple(name for name in STAGES if not name.startswith("zero_"))
"""Keys that change speed and memory, but no result."""

OFFLOAD_STAGES = {
    ("offload_optimizer", "cpu"): (1, 2, 3),
    ("offload_optimizer", "nvme"): (3,),
    ("offload_param", "cpu"): (3,),
    ("offload_param", "nvme"): (3,),
}
"""Offload -> stages that support it; at the others DeepSpeed silently offloads less."""

OFFLOAD_DEVICES = {
    "offload_optimizer.nvme_path": ("nvme",),
    "offload_optimizer.pin_memory": ("cpu", "nvme"),
    "offload_optimizer.buffer_count": ("nvme",),
    "offload_optimizer.pipeline_read": ("nvme",),
    "offload_optimizer.pipeline_write": ("nvme",),
    "offload_optimizer.ratio": ("cpu",),
    "offload_param.nvme_path": ("nvme",),
    "offload_param.pin_memory": ("cpu", "nvme"),
    "offload_param.buffer_count": ("nvme",),
    "offload_param.buffer_size": ("nvme",),
    "offload_param.max_in_cpu": ("nvme",),
}
"""Key of an offload section -> devices that read it."""

IGNORED_BY_BF16_OPTIMIZER = (
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "round_robin_gradients",
)
"""Keys without effect where DeepSpeed uses its BF16_Optimizer."""


def uses_bf16_optimizer(stage: int, dtype: str | None, grad_dtype: str | None, offload_optimizer: str) -> bool:
    """Whether DeepSpeed runs on its BF16_Optimizer, which ignores part of the section."""
    return (stage, dtype, grad_dtype, offload_optimizer) == (1, "bf16", "fp32", "none")
