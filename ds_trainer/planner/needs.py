"""What one rank keeps in memory and on NVMe: the table of `memory`, and the buffers that the config sizes. Pure."""

from __future__ import annotations

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.planner.memory import DTYPE_BYTES, MemoryRow, Part, bytes_per_parameter


def row_of(resolved: ResolvedConfig) -> MemoryRow:
    """The row of the table for a run; DDP keeps what stage 0 keeps."""
    config = resolved.config
    zero, precision = config.zero, config.precision
    dtype = precision.dtype or "fp32"
    is_zero = config.parallel.engine == "deepspeed"
    return bytes_per_parameter(
        zero.stage if is_zero else 0,
        dtype,
        precision.grad_dtype or dtype,
        resolved.data_ranks,
        config.optimizer.name,
        zero.offload_optimizer.device if is_zero else "none",
        zero.offload_param.device if is_zero else "none",
        accumulation=config.batch.accumulation or 1,
        momentum=config.optimizer.momentum > 0,
    )


def buffers(config: RunConfig, num_parameters: int, data_ranks: int) -> list[Part]:
    """Buffers of one rank whose size the config sets in elements; `size` is in bytes here, not per parameter.

    Args:
        config: A resolved config.
        num_parameters: Elements of the model.
        data_ranks: Ranks over which state is sharded.
    """
    zero, precision = config.zero, config.precision
    if config.parallel.engine != "deepspeed" or zero.stage == 0:
        return []
    param_bytes = DTYPE_BYTES[precision.dtype or "fp32"]
    reduce_bytes = DTYPE_BYTES[precision.communication_data_type or precision.grad_dtype or "fp32"]
    copies = 2 if zero.overlap_comm and zero.stage < 3 else 1
    parts = [Part("reduce buckets", copies * (zero.reduce_bucket_size or 0) * reduce_bytes)]
    if zero.stage < 3:
        return parts
    parts += [Part("prefetched parameters", (zero.stage3_prefetch_bucket_size or 0) * param_bytes)]
    sub_group = min(zero.sub_group_size or num_parameters, -(-num_parameters // data_ranks))
    if zero.offload_optimizer.device == "nvme":
        parts += [Part("optimizer swap buffers", zero.offload_optimizer.buffer_count * sub_group * 4, "host")]
    if zero.offload_param.device == "nvme":
        swap = (zero.offload_param.buffer_count or 5) * (zero.offload_param.buffer_size or 0) + sub_group
        parts += [Part("parameter swap buffers", swap * param_bytes, "host")]
    return parts
