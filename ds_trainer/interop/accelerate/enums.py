"""The values that accelerate and FSDP accept for keys with a fixed set of values. Pure.

Source: accelerate 1.15, utils/constants.py and utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_trainer.errors import ConfigError, ConfigErrors

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's sharding strategies; a number counts them from 1."""

_DEVICES = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")

ENUM_VALUES = {
    "compute_environment": ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    "distributed_type": (
        *("DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO", "MEGATRON_LM", "XLA"),
        *(f"MULTI_{device}" for device in _DEVICES),
    ),
    "mixed_precision": ("no", "bf16", "fp16", "fp8"),
    "dynamo_backend": (
        *("no", "INDUCTOR", "EAGER", "AOT_EAGER", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT"),
        *("ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM"),
        *("HPU_BACKEND", "NEURON"),
    ),
    "dynamo_mode": ("default", "reduce-overhead", "max-autotune"),
}
"""Key by its last part -> what it can be, in upper or lower case."""

FSDP_ENUM_VALUES = {
    "version": ("1", "2"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "backward_prefetch": _PREFETCHES,
    "state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
}
_FSDP1_ENUM_VALUES = {"sharding_strategy": STRATEGIES, "reshard_after_forward": (*STRATEGIES, "true", "false")}
_COUNTED = ("sharding_strategy", "reshard_after_forward", "backward_prefetch")
"""Keys that also take the number of a value, from 1."""


def check_enum_values(native: Mapping[str, Any]) -> None:
    """Refuses values that accelerate does not accept, outside `fsdp_config`.

    Raises:
        ConfigErrors: Every one.
    """
    dynamo = {f"dynamo_config.{name}": item for name, item in (native.get("dynamo_config") or {}).items()}
    _refuse(
        _unknown(
            {**native, **dynamo},
            {**ENUM_VALUES, **{f"dynamo_config.{name}": ENUM_VALUES[name] for name in ENUM_VALUES}},
        )
    )


def check_fsdp_enum_values(section: Mapping[str, Any], is_fsdp2: bool) -> None:
    """Refuses values that FSDP does not accept.

    Args:
        section: The FSDP section, its keys without `fsdp_`.
        is_fsdp2: Whether it is FSDP2's, where a strategy is not read.

    Raises:
        ConfigErrors: Every one.
    """
    values = FSDP_ENUM_VALUES if is_fsdp2 else FSDP_ENUM_VALUES | _FSDP1_ENUM_VALUES
    _refuse(_unknown(section, values, "fsdp_config.fsdp_"))


def _unknown(
    section: Mapping[str, Any], values: Mapping[str, tuple[str, ...]], prefix: str = ""
) -> Iterator[ConfigError]:
    for name, item in section.items():
        if name not in values or item in (None, {}, []):
            continue
        known = list(values[name])
        numbers = [str(number) for number in range(1, len(known) + 1)] if name in _COUNTED else []
        text = "no" if item is False and "no" in map(str.lower, known) else str(item)
        if text.lower() not in [value.lower() for value in known + numbers]:
            yield ConfigError(
                f"{prefix}{name} is {item!r}",
                f"accelerate accepts {', '.join(known)}",
                f"set {prefix}{name} to one of these",
            )


def _refuse(unknown: Iterator[ConfigError]) -> None:
    if errors := list(unknown):
        raise ConfigErrors(errors)
