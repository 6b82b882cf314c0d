"""Sizes and switches of ZeRO that follow from the model and the device. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.config.deepspeed.stages_of_keys import IGNORED_BY_BF16_OPTIMIZER, STAGES, uses_bf16_optimizer
from ds_trainer.config.engine_sections import ZeroConfig
from ds_trainer.config.resolved import Machine, ModelSize
from ds_trainer.errors import ConfigError

Derived = dict[str, tuple[Any, str]]
"""Dotted key -> value and reason."""

_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}
"""DeepSpeed's default sizes in elements: our upper bounds, and our values when the model is not known."""

_UNBOUNDED = {"stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000}
_PERSISTENCE = 100_000
_PARAM_BUFFER = 100_000_000
_PARAM_BUFFER_COUNT = 5


def check_parameter_buffer(
    zero: ZeroConfig, origins: Mapping[str, str], machine: Machine, size: ModelSize
) -> list[ConfigError]:
    """A swap buffer that is too small for a parameter: DeepSpeed stops there while it loads the model."""
    part, largest = zero.offload_param, size.largest_parameter
    if part.device != "nvme" or part.buffer_size is None or largest is None:
        return []
    needed = -(-largest // machine.world)
    if part.buffer_size >= needed:
        return []
    return [
        ConfigError(
            f"zero.offload_param.buffer_size is {part.buffer_size} "
            f"({origins.get('zero.offload_param.buffer_size', 'default')}), and the largest parameter has {largest} "
            "elements",
            f"a buffer holds one rank's shard of any parameter: {needed} elements on {machine.world} data-parallel "
            "ranks",
            f"remove zero.offload_param.buffer_size, or set it to {needed} or more",
        )
    ]


def derive_zero(
    zero: ZeroConfig, dtypes: tuple[str, str], origins: Mapping[str, str], machine: Machine, size: ModelSize
) -> Derived:
    """Every open value of the section that the run uses; explicit sizes are clamped to the model.

    Args:
        zero: The section.
        dtypes: Dtypes of the backward pass and of gradient accumulation.
        origins: Dotted key -> the place that set it.
        machine: Data ranks and device.
        size: The model's size.
    """
    derived: Derived = {}
    used = {name for name, stages in STAGES.items() if zero.stage in stages}
    if uses_bf16_optimizer(zero.stage, *dtypes, zero.offload_optimizer.device):
        used -= set(IGNORED_BY_BF16_OPTIMIZER)
    for name in _DEFAULTS:
        if name in used and (found := _clamped(zero, name, origins, size.num_parameters)):
            derived[f"zero.{name}"] = found
    for name, constant in _UNBOUNDED.items():
        if name in used and getattr(zero, name) is None:
            derived[f"zero.{name}"] = (constant, "DeepSpeed's own")
    if "overlap_comm" in used and zero.overlap_comm is None:
        # Whether overlap leaves the results unchanged can be tested on a GPU only: we follow DeepSpeed's default.
        on = zero.stage == 3 and machine.device == "cuda"
        why = "DeepSpeed's own at stage 3" if on else "DeepSpeed's own below stage 3"
        derived["zero.overlap_comm"] = (on, why if machine.device == "cuda" else "a CPU has no second stream")
    if "stage3_param_persistence_threshold" in used and zero.stage3_param_persistence_threshold is None:
        derived["zero.stage3_param_persistence_threshold"] = (
            (10 * size.hidden_size, f"10 x hidden size {size.hidden_size}")
            if size.hidden_size
            else (_PERSISTENCE, "DeepSpeed's own; the hidden size is not known")
        )
    for name, part in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if part.device != "none" and part.pin_memory is None:
            derived[f"zero.{name}.pin_memory"] = _on_gpu(
                machine, "copies to the GPU faster", "there is no GPU to copy to"
            )
    return derived | _nvme_optimizer(zero) | _nvme_parameters(zero, machine, size)


def _clamped(zero: ZeroConfig, name: str, origins: Mapping[str, str], elements: int | None) -> tuple[int, str] | None:
    chosen, constant = getattr(zero, name), _DEFAULTS[name]
    size = constant if chosen is None else chosen
    # DeepSpeed asserts an even all-gather bucket.
    odd = name == "allgather_bucket_size" and elements is not None and elements % 2
    most = None if elements is None else elements + bool(odd)
    if most is not None and size > most:
        source = "" if chosen is None else f"{origins.get(f'zero.{name}', 'default')} says {chosen}; "
        return most, f"{source}no more than there are: {elements} elements"
    if chosen is not None:
        return None
    return constant, "DeepSpeed's own" + ("; the model's size is not known" if elements is None else "")


def _on_gpu(machine: Machine, why: str, why_not: str) -> tuple[bool, str]:
    return (True, why) if machine.device == "cuda" else (False, why_not)


def _nvme_optimizer(zero: ZeroConfig) -> Derived:
    if zero.offload_optimizer.device != "nvme" or zero.sub_group_size is not None:
        return {}
    why = "each parameter by itself: swap buffers hold the largest one, and each gradient begins on a block of its file"
    return {"zero.sub_group_size": (1, why)}


def _nvme_parameters(zero: ZeroConfig, machine: Machine, size: ModelSize) -> Derived:
    part = zero.offload_param
    if part.device != "nvme":
        return {}
    derived: Derived = {}
    if zero.stage3_prefetch_bucket_size is None:
        why = "DeepSpeed 0.19 stops at a parameter used twice within what it prefetches from nvme, as a head is"
        derived["zero.stage3_prefetch_bucket_size"] = (0, why)
    if part.buffer_count is None:
        derived["zero.offload_param.buffer_count"] = (_PARAM_BUFFER_COUNT, "DeepSpeed's own")
    if part.buffer_size is None:
        largest = size.largest_parameter
        derived["zero.offload_param.buffer_size"] = (
            (
                -(-largest // machine.world),
                f"the largest parameter, {largest} elements, on {machine.world} data-parallel ranks",
            )
            if largest
            else (_PARAM_BUFFER, "DeepSpeed's own; the model is not known")
        )
    if part.max_in_cpu is None:
        derived["zero.offload_param.max_in_cpu"] = (0, "nvme was asked for: nothing stays in host memory")
    return derived
