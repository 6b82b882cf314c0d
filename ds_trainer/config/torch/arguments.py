"""The arguments of `fully_shard` and `DistributedDataParallel` for a resolved config. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_trainer.config.resolved import ResolvedConfig


@dataclass(frozen=True)
class FSDP2Arguments:
    """The arguments of FSDP2; dtypes by their names in the config.

    Args:
        mesh: Axis name -> size, outermost first: `dp_shard`, or `dp_replicate` and `dp_shard` (HSDP).
        reshard_after_forward: As in `fully_shard`.
        param_dtype: Dtype of gathered parameters; None: that of the master weights, fp32.
        reduce_dtype: Dtype in which gradients are accumulated and reduced.
        buffer_dtype: Dtype of floating-point buffers; None: as the model makes them.
        cpu_offload: Whether `CPUOffloadPolicy` applies.
        pin_memory: Its argument.
    """

    mesh: dict[str, int]
    reshard_after_forward: bool | int
    param_dtype: str | None
    reduce_dtype: str
    buffer_dtype: str | None
    cpu_offload: bool
    pin_memory: bool


def fsdp2_arguments(resolved: ResolvedConfig) -> FSDP2Arguments:
    """The arguments of `fully_shard` for a run of the fsdp2 backend."""
    config = resolved.config
    fsdp, precision, parallel = config.fsdp, config.precision, config.parallel
    assert fsdp.reshard_after_forward is not None and fsdp.cpu_offload is not None and fsdp.pin_memory is not None
    assert parallel.dp_shard is not None and precision.communication_data_type is not None
    replicate = {"dp_replicate": parallel.dp_replicate} if parallel.dp_replicate > 1 else {}
    return FSDP2Arguments(
        mesh=replicate | {"dp_shard": parallel.dp_shard},
        reshard_after_forward=fsdp.reshard_after_forward,
        param_dtype=None if precision.dtype == "fp32" else precision.dtype,
        reduce_dtype=precision.communication_data_type,
        buffer_dtype=fsdp.buffer_dtype,
        cpu_offload=fsdp.cpu_offload,
        pin_memory=fsdp.pin_memory,
    )


def ddp_arguments(resolved: ResolvedConfig) -> dict[str, Any]:
    """The arguments of `DistributedDataParallel` that the config decides."""
    config = resolved.config.ddp
    return {
        "bucket_cap_mb": config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "find_unused_parameters": bool(config.find_unused_parameters),
        "static_graph": config.static_graph,
    }
