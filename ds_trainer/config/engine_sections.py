"""The sections of a run's JSON about engines: parallelism, ZeRO, FSDP2, DDP, accelerate, precision, raw keys. Pure.

Keys inside `zero`, `fsdp` and `ddp` carry the names of DeepSpeed, of `fully_shard` and accelerate's FSDP plugin, and of
`DistributedDataParallel`, so that habits carry over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ds_trainer.config.field_types import Elements, ElementsOrZero, Name, PositiveInt, Ranks, Section, Threshold

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


class ParallelConfig(Section):
    """Which engine runs the step, and how the ranks are laid out."""

    engine: Name = "deepspeed"
    """`deepspeed`, `fsdp2`, `ddp`, `accelerate`, or a plug-in of the entry-point group `ds_trainer.engines`."""
    dp_replicate: Ranks = 1
    """Replicas of the sharded model (HSDP, fsdp2): data-parallel ranks = dp_replicate x dp_shard."""
    dp_shard: Ranks | None = None
    """Ranks over which fsdp2 shards one replica of the model; None: data-parallel ranks / dp_replicate."""
    tp: Ranks = 1
    """Tensor parallelism: ranks over which every layer is sharded; data-parallel ranks = ranks / (tp x pp)."""
    tp_plan: dict[Name, Name] | None = None
    """Module name, `*` for any part of it -> style ("colwise", "rowwise", "replicate", ...), over the type's plan."""
    sequence_parallel: bool = False
    """With tp: norms, dropout and residuals on 1/tp of the sequence (Korthikanti et al. 2022)."""
    keep_gathered_input: bool = False
    """With sequence_parallel: keep each gathered input for the backward pass instead of gathering it again."""
    pp: Ranks = 1
    """Pipeline parallelism: ranks that each hold some layers; batch.accumulation micro-batches pass through them."""
    schedule: Schedule = "1f1b"
    """With pp: the order of forward and backward passes, named as in torch.distributed.pipelining."""
    virtual_stages: Annotated[int, Field(gt=0, le=128)] | None = None
    """With pp: stages on each rank; None: 1 with gpipe and 1f1b, else 2."""
    pp_split: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """With pp: layers of each of the pp x virtual_stages stages, in order; None: so that the slowest is fastest."""


class OffloadOptimizerConfig(Section):
    """Where DeepSpeed keeps fp32 master weights and optimizer states; names as in DeepSpeed."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`cpu` from stage 1, `nvme` from stage 3."""
    nvme_path: Name | None = None
    """Folder on the NVMe drive; each run and rank uses its own sub-folder, removed at the end."""
    pin_memory: bool | None = None
    """Page-locked host buffers; None: on with a GPU."""
    buffer_count: Annotated[int, Field(gt=0, le=10**4)] = 4
    """Buffers that swap optimizer states (nvme)."""
    pipeline_read: bool = False
    """Read the next sub-group while this one is updated (nvme)."""
    pipeline_write: bool = False
    """Write the last sub-group while this one is updated (nvme)."""
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of the optimizer's work done on the host (stage 3, cpu, adamw with a constant learning rate)."""


class OffloadParamConfig(Section):
    """Where DeepSpeed keeps the parameters of ZeRO stage 3; names as in DeepSpeed."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Stage 3 only."""
    nvme_path: Name | None = None
    """Folder on the NVMe drive; each run and rank uses its own sub-folder, removed at the end."""
    pin_memory: bool | None = None
    """Page-locked host buffers; None: on with a GPU."""
    buffer_count: Annotated[int, Field(gt=0, le=10**4)] | None = None
    """Buffers that swap parameters (nvme); None: DeepSpeed's 5, more where a module needs them."""
    buffer_size: Elements | None = None
    """Elements in a buffer (nvme); None: the model's largest parameter on a rank."""
    max_in_cpu: ElementsOrZero | None = None
    """Elements kept in host memory rather than on the drive (nvme); None: 0."""


class AioConfig(Section):
    """DeepSpeed's asynchronous file I/O, used by nvme offload."""

    block_size: PositiveInt = 1048576
    """Bytes per request."""
    queue_depth: Annotated[int, Field(gt=0, le=2**16)] = 8
    """Requests in flight."""
    intra_op_parallelism: Annotated[int, Field(gt=0, le=1024)] = 1
    """Threads per request."""
    single_submit: bool = False
    """Submit requests one by one."""
    overlap_events: bool = True
    """Submit and wait at the same time."""


class ZeroConfig(Section):
    """DeepSpeed ZeRO; keys named as in DeepSpeed's `zero_optimization`."""

    stage: Literal[0, 1, 2, 3] = 2
    """0 replicates all; 1 shards optimizer states; 2 gradients too; 3 parameters too."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Optimizer offload."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Parameter offload."""
    aio: AioConfig = AioConfig()
    """File I/O of nvme offload."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass; None: on at stage 3 with a GPU, as in DeepSpeed."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they are made."""
    reduce_scatter: bool = True
    """Reduce-scatter instead of all-reduce."""
    round_robin_gradients: bool = False
    """Spread gradient copies of optimizer offload over the ranks (stages 1 and 2)."""
    reduce_bucket_size: Elements | None = None
    """Elements reduced at once; None: 5e8, never more than the model."""
    allgather_bucket_size: Elements | None = None
    """Elements gathered at once (stages 1 and 2); None: 5e8, never more than the model."""
    sub_group_size: Elements | None = None
    """Elements updated at once (stage 3); None: 1e9, never more than the model, or 1 with an nvme optimizer."""
    stage3_prefetch_bucket_size: ElementsOrZero | None = None
    """Elements fetched ahead (stage 3); None: 5e7, never more than the model."""
    stage3_param_persistence_threshold: Threshold | None = None
    """Parameters smaller than this stay gathered (stage 3); None: 1e5, or 10 x hidden size when that is known."""
    stage3_model_persistence_threshold: Threshold | None = None
    """Most elements that always stay gathered (stage 3); None: no bound."""
    stage3_max_live_parameters: Threshold | None = None
    """Elements gathered at a time (stage 3); None: 1e9."""
    stage3_max_reuse_distance: Threshold | None = None
    """Keep a parameter that is used again within this many elements (stage 3); None: 1e9."""
    zero_hpz_partition_size: PositiveInt = 1
    """ZeRO++: ranks of the secondary parameter partition (stage 3)."""
    zero_quantized_weights: bool = False
    """ZeRO++: gather weights in int8 (stage 3)."""
    zero_quantized_gradients: bool = False
    """ZeRO++: reduce gradients in int4 (stage 3)."""


class DDPConfig(Section):
    """PyTorch DistributedDataParallel; keys named as its arguments."""

    bucket_cap_mb: Annotated[int, Field(gt=0, le=10**6)] = 25
    """MiB reduced at once."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets: one copy less."""
    find_unused_parameters: bool | None = None
    """Look for parameters without a gradient at each step; None: off."""
    static_graph: bool = False
    """The graph never changes between steps."""
    comm_hook: Literal["bf16", "fp16", "powersgd"] | None = None
    """Compression of the gradients on the wire; changes the numbers."""
    powersgd_rank: Annotated[int, Field(gt=0, le=2**16)] = 1
    """Rank of PowerSGD's approximation."""


class FSDPConfig(Section):
    """PyTorch FSDP2; keys named as the arguments of `fully_shard` and of accelerate's FSDP plugin."""

    reshard_after_forward: bool | Annotated[int, Field(gt=1, le=10**6)] | None = None
    """Free gathered parameters after forward; a number: shard them over so many ranks; None: `zero.stage` or true."""
    cpu_offload: bool | None = None
    """Keep parameters, gradients and optimizer states on the host, where the optimizer runs; None: `zero.offload_*`."""
    pin_memory: bool | None = None
    """Page-locked host memory for `cpu_offload`; None: with a GPU."""
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of floating-point buffers; None: as the model makes them, which rotary frequencies need."""
    auto_wrap_policy: Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = None
    """What is gathered at once: a block, modules of `min_num_params`, or all; None: by the keys below, or blocks."""
    transformer_layer_cls_to_wrap: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Classes of the blocks (`transformer_based_wrap`); None: those that transformers says are not to be split."""
    min_num_params: Elements | None = None
    """Elements from which on a module is gathered by itself (`size_based_wrap`); None: 1e8, less for small models."""
    prefetch_depth: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Blocks gathered ahead, in both passes; None: torch's own order, one ahead in the backward pass."""


class AccelerateConfig(Section):
    """Hugging Face accelerate, configured by this JSON."""

    backend: Literal["deepspeed", "fsdp2", "ddp"] = "deepspeed"
    """The backend that accelerate runs on; the section of that backend (`zero`, `fsdp`, `ddp`) applies."""


class LossScaleConfig(Section):
    """Dynamic loss scale of fp16; names as in DeepSpeed's `fp16`."""

    initial_scale_power: Annotated[int, Field(ge=0, le=64)] = 16
    """The scale starts at two to this power."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows before the scale halves."""
    min_loss_scale: PositiveInt = 1
    """Lower bound of the scale: an overflow there counts as non-finite."""


class PrecisionConfig(Section):
    """Dtypes. Master weights and optimizer states are always fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the forward and backward pass; None: bf16 where the device has it natively, else fp32."""
    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype in which micro-batches' gradients are accumulated; None: fp32 (fp16 with fp16 at stage 0)."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype in which gradients are reduced over ranks; None: that of accumulation."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scaling, used with fp16 only."""


class NativeConfig(Section):
    """Raw keys handed to an engine, merged last."""

    deepspeed: dict[str, Any] = {}
    """DeepSpeed JSON; keys that contradict the unified part, or that DeepSpeed never reads or takes so, are refused."""
