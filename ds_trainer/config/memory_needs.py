"""What one rank keeps in memory and on NVMe: rows of `planning.memory` for a run, and the config's buffers. Pure."""

from __future__ import annotations

from dataclasses import replace

from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.stages_of_keys import OFFLOAD_STAGES
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.planning.memory import (
    DTYPE_BYTES,
    MemoryItem,
    MemoryRow,
    bytes_per_parameter,
    ddp_bytes_per_parameter,
    fsdp2_bytes_per_parameter,
)


def memory_row(resolved: ResolvedConfig) -> MemoryRow:
    """The row of the table for a run; a plug-in engine is assumed to keep what stage 0 keeps."""
    config = resolved.config
    zero, precision, optimizer = config.zero, config.precision, config.optimizer
    dtype, momentum = precision.dtype or "fp32", config.optimizer.momentum > 0
    if backend(config) == "ddp":
        # Under a pipeline gradients are copied into one bucket after another once all passes are done.
        is_view = config.ddp.gradient_as_bucket_view and config.parallel.pp == 1
        return ddp_bytes_per_parameter(dtype, optimizer.name, gradient_as_bucket_view=is_view, momentum=momentum)
    if backend(config) == "fsdp2":
        assert config.fsdp.reshard_after_forward is not None
        return fsdp2_bytes_per_parameter(
            dtype,
            precision.communication_data_type or "fp32",
            config.parallel.dp_shard or 1,
            optimizer.name,
            reshard_after_forward=config.fsdp.reshard_after_forward,
            cpu_offload=bool(config.fsdp.cpu_offload),
            accumulation=config.batch.accumulation or 1,
            momentum=momentum,
        )
    is_zero = backend(config) == "deepspeed"
    return bytes_per_parameter(
        zero.stage if is_zero else 0,
        dtype,
        precision.grad_dtype or dtype,
        resolved.dp_size,
        optimizer.name,
        zero.offload_optimizer.device if is_zero else "none",
        zero.offload_param.device if is_zero else "none",
        accumulation=config.batch.accumulation or 1,
        momentum=momentum,
    )


def memory_rows_by_stage(resolved: ResolvedConfig) -> dict[tuple[int, str], MemoryRow]:
    """The run's row and those of the other ZeRO stages: stage and gradient dtype -> row.

    Gradients are fp32 and, where the stage has it, of the backward pass's dtype; offload is the run's where the stage
    has it. Outside DeepSpeed there is one row, under a pipeline there are stages 0 and 1 only.
    """
    config = resolved.config
    dtype = config.precision.dtype or "fp32"
    if backend(config) != "deepspeed":
        return {(0, config.precision.grad_dtype or "fp32"): memory_row(resolved)}
    table = {}
    for stage in (0, 1) if config.parallel.pp > 1 else (0, 1, 2, 3):
        # DeepSpeed's stage 0 has one dtype each: bf16 runs under autocast on fp32, fp16 accumulates in fp16.
        grad_dtypes = (("fp16" if dtype == "fp16" else "fp32"),) if stage == 0 else ("fp32", dtype)
        for grad_dtype in dict.fromkeys(grad_dtypes):
            table[stage, grad_dtype] = memory_row(replace(resolved, config=_at(config, stage, grad_dtype)))
    return table


def _at(config: RunConfig, stage: int, grad_dtype: str) -> RunConfig:
    """The config at another stage, without the offload that DeepSpeed lacks there."""
    parts = {name: getattr(config.zero, name) for name in ("offload_optimizer", "offload_param")}
    lacking = {
        name: type(part)() for name, part in parts.items() if stage not in OFFLOAD_STAGES.get((name, part.device), ())
    }
    return config.model_copy(
        update={
            "zero": config.zero.model_copy(update={"stage": stage, **lacking}),
            "precision": config.precision.model_copy(update={"grad_dtype": grad_dtype}),
        }
    )


def buffers(resolved: ResolvedConfig) -> list[MemoryItem]:
    """Buffers of one rank that the table leaves out; `size` is in bytes here, not per parameter."""
    config, dp_size = resolved.config, resolved.dp_size
    num_parameters = resolved.size.num_parameters or 0
    zero, precision = config.zero, config.precision
    if backend(config) == "ddp" and config.parallel.pp > 1:
        return [MemoryItem("gradient buckets", min(4 * num_parameters, config.ddp.bucket_cap_mb * 2**20))]
    if backend(config) == "ddp" and not config.ddp.gradient_as_bucket_view:
        return [MemoryItem("gradient buckets", 4 * num_parameters)]
    if backend(config) != "deepspeed" or zero.stage == 0:
        return []
    param_bytes = DTYPE_BYTES[precision.dtype or "fp32"]
    reduce_bytes = DTYPE_BYTES[precision.communication_data_type or precision.grad_dtype or "fp32"]
    copies = 2 if zero.overlap_comm and zero.stage < 3 else 1
    parts = [MemoryItem("reduce buckets", copies * (zero.reduce_bucket_size or 0) * reduce_bytes)]
    if zero.stage < 3:
        return parts
    parts += [MemoryItem("prefetched parameters", (zero.stage3_prefetch_bucket_size or 0) * param_bytes)]
    sub_group = max(
        min(zero.sub_group_size or num_parameters, -(-num_parameters // dp_size)),
        # A sub-group holds the largest parameter at least.
        -(-(resolved.size.largest_parameter or 0) // dp_size),
    )
    if zero.offload_optimizer.device == "nvme":
        parts += [MemoryItem("optimizer swap buffers", zero.offload_optimizer.buffer_count * sub_group * 4, "host")]
    if zero.offload_param.device == "nvme":
        swap = (zero.offload_param.buffer_count or 5) * (zero.offload_param.buffer_size or 0) + sub_group
        parts += [MemoryItem("parameter swap buffers", swap * param_bytes, "host")]
    return parts
