"""The sections of a run's JSON. `None` means: derived at resolve time, with its reason.

Keys inside `zero`, `fsdp` and `ddp` carry the names of DeepSpeed, of `fully_shard` and accelerate's FSDP plugin, and of
`DistributedDataParallel`, so that habits carry over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# The upper bounds are beyond any real run; a slip of the keyboard ends here and not in a C++ conversion error.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
BatchSize = Annotated[int, Field(gt=0, le=10**6)]
Elements = Annotated[int, Field(gt=0, le=10**12)]
ElementsOrZero = Annotated[int, Field(ge=0, le=10**12)]
Threshold = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Elements; DeepSpeed's own "no bound" is the largest int64."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Ranks = Annotated[int, Field(gt=0, le=10**6)]
Seconds = Annotated[float, Field(gt=0.0, le=10**6)]
Name = Annotated[str, Field(min_length=1)]
Paths = Name | Annotated[tuple[Name, ...], Field(min_length=1)]


class Section(BaseModel):
    """A frozen section that knows only its own keys and does not turn "8" into 8."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """Which checkpoint is trained, and how its modules run."""

    path: Name | None = None
    """Folder of a Hugging Face checkpoint, or a hub id; may be left out only when `Trainer(model=instance)` is used."""
    revision: Name | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: Name | None = None
    """Folder or hub id of the tokenizer; None: the checkpoint's own."""
    auto_class: Name = "AutoModelForCausalLM"
    """Transformers auto class that builds the model."""
    attn_implementation: Name | None = None
    """Attention kernel by its transformers name (`eager`, `sdpa`, `flash_attention_2`); None: transformers' choice."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass; `selective` keeps the results of matrix products and attention."""
    compile: bool = False
    """Compile each block of the model with `torch.compile`."""
    resize_embeddings: bool = False
    """Grow the embeddings to the tokenizer's length when the tokenizer has more tokens."""
    pad_embeddings_to_multiple_of: PositiveInt | None = None
    """With `resize_embeddings`: round the number of rows up to a multiple of this."""
    allow_pickle: bool = False
    """Read `pytorch_model.bin` (pickled) weights when a checkpoint has no safetensors."""
    trust_remote_code: bool = False
    """Run the Python code that a checkpoint ships."""


class DataConfig(Section):
    """Where samples come from and how they become tokens."""

    train: Paths | None = None
    """Training files (json, jsonl, parquet); may be left out only when `Trainer(train_dataset=...)` is used."""
    eval: Paths | None = None
    """Evaluation files."""
    max_length: Annotated[int, Field(ge=2, le=10**9)] | None = None
    """Longest sample in tokens; None: what the model's positions and the tokenizer allow."""
    on_too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a sample longer than `max_length`."""
    max_affected_fraction: Fraction = 0.5
    """Largest share of samples that may be truncated, dropped or left without a supervised token."""
    chat_template: Name | None = None
    """File with a Jinja chat template, used instead of the tokenizer's."""
    cache_dir: Name | None = None
    """Folder of the tokenised data; None: `ds_trainer/` below the Hugging Face cache."""
    shuffle: bool = True
    """Draw a new permutation of the samples each epoch, from `run.seed`."""
    preview_samples: Annotated[int, Field(ge=0, le=1000)] = 2
    """Samples whose supervised text is printed at the start."""
    num_workers: Annotated[int, Field(ge=0, le=1000)] = 0
    """Processes per rank that read and collate samples; 0: the training process does."""
    prefetch_factor: Annotated[int, Field(gt=0, le=10**4)] = 2
    """Micro-batches that each worker makes ahead."""
    pin_memory: bool | None = None
    """Hand batches over in page-locked memory; None: with a GPU."""


Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


class ParallelConfig(Section):
    """Which engine runs the step, and how the ranks are laid out."""

    engine: Name = "deepspeed"
    """`deepspeed`, `fsdp2`, `ddp`, `accelerate`, or a plug-in of the entry-point group `ds_trainer.engines`."""
    dp_replicate: Ranks = 1
    """Copies of the sharded model (HSDP, fsdp2): data ranks = dp_replicate x dp_shard."""
    dp_shard: Ranks | None = None
    """Ranks over which fsdp2 cuts one copy of the model; None: data ranks / dp_replicate."""
    tp: Ranks = 1
    """Tensor parallelism: ranks that share every layer of one copy of the model; data ranks = ranks / (tp x pp)."""
    tp_plan: dict[Name, Name] | None = None
    """Module name, `*` for any part of it -> style ("colwise", "rowwise", "replicate", ...), over the type's plan."""
    sequence_parallel: bool = False
    """With tp: norms, dropout and residuals on 1/tp of the sequence (Korthikanti et al. 2022)."""
    keep_gathered_input: bool = False
    """With sequence_parallel: keep each gathered input for the backward pass, which else gathers it again."""
    pp: Ranks = 1
    """Pipeline parallelism: ranks that each hold some layers; batch.accumulation micro-batches pass through them."""
    schedule: Schedule = "1f1b"
    """With pp: the order of forward and backward passes, named as in torch.distributed.pipelining."""
    virtual_stages: Annotated[int, Field(gt=0, le=128)] | None = None
    """With pp: stages on each rank; None: 1 with gpipe and 1f1b, else 2."""
    pp_split: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """With pp: layers of each of the pp x virtual_stages stages, in order; None: so that the slowest is fastest."""


class OffloadOptimizerConfig(Section):
    """Where DeepSpeed keeps fp32 masters and optimizer states; names as in DeepSpeed."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`cpu` from stage 1, `nvme` from stage 3."""
    nvme_path: Name | None = None
    """Folder on the NVMe drive; each run and rank uses a sub-folder of its own, removed at the end."""
    pin_memory: bool | None = None
    """Page-locked host buffers; None: on with a GPU."""
    buffer_count: Annotated[int, Field(gt=0, le=10**4)] = 4
    """Buffers that swap optimizer states (nvme)."""
    pipeline_read: bool = False
    """Read the next sub-group while this one is updated (nvme)."""
    pipeline_write: bool = False
    """Write the last sub-group while this one is updated (nvme)."""
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the optimizer's work done on the host (stage 3, cpu, adamw with a constant learning rate)."""


class OffloadParamConfig(Section):
    """Where DeepSpeed keeps the parameters of ZeRO stage 3; names as in DeepSpeed."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Stage 3 only."""
    nvme_path: Name | None = None
    """Folder on the NVMe drive; each run and rank uses a sub-folder of its own, removed at the end."""
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
    """Reduce gradients while the backward pass goes on; None: on at stage 3 with a GPU, as in DeepSpeed."""
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
    """Most elements that stay gathered for good (stage 3); None: no bound."""
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
    """Free gathered parameters after forward; a number: cut them over so many ranks. None: `zero.stage`'s, or true."""
    cpu_offload: bool | None = None
    """Keep parameters, gradients and optimizer states on the host, where the optimizer runs; None: `zero.offload_*`."""
    pin_memory: bool | None = None
    """Page-locked host memory for `cpu_offload`; None: with a GPU."""
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format of floating-point buffers; None: as the model makes them, which rotary frequencies need."""
    auto_wrap_policy: Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = None
    """What is gathered at once: a block, modules of `min_num_params`, or all; None: by the keys below, or blocks."""
    transformer_layer_cls_to_wrap: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Classes of the blocks (`transformer_based_wrap`); None: those that transformers says are not to be split."""
    min_num_params: Elements | None = None
    """Elements from which on a module is gathered by itself (`size_based_wrap`); None: 1e8, less for small models."""
    prefetch_depth: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Blocks gathered ahead, in both passes; None: torch's own order, one ahead in the backward pass."""


class AccelerateConfig(Section):
    """Hugging Face accelerate, driven by this JSON."""

    backend: Literal["deepspeed", "fsdp2", "ddp"] = "deepspeed"
    """What accelerate runs on; its own section of this JSON (`zero`, `fsdp`, `ddp`) applies."""


class LossScaleConfig(Section):
    """Dynamic loss scale of fp16; names as in DeepSpeed's `fp16`."""

    initial_scale_power: Annotated[int, Field(ge=0, le=64)] = 16
    """The scale starts at two to this power."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows before the scale halves."""
    min_loss_scale: PositiveInt = 1
    """The scale's lower end: an overflow there counts as non-finite."""


class PrecisionConfig(Section):
    """Number formats. Masters and optimizer states are always fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format of the forward and backward pass; None: bf16 where the device has it natively, else fp32."""
    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Format in which micro-batches' gradients are accumulated; None: fp32 (fp16 with fp16 at stage 0)."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    """Format in which gradients are reduced over ranks; None: that of accumulation."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scaling, used with fp16 only."""


class BatchConfig(Section):
    """global_size = micro_size x accumulation x data ranks: any that determine the rest suffice."""

    global_size: BatchSize | None = None
    """Samples per optimizer step over all ranks."""
    micro_size: BatchSize | None = None
    """Samples per forward pass of one rank."""
    accumulation: BatchSize | None = None
    """Forward passes of one rank per optimizer step."""


class LossConfig(Section):
    """The loss: a sum over the label tokens of the whole step divided by their number."""

    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Weight of the uniform distribution in the target."""
    chunk_tokens: PositiveInt | None = None
    """Compute logits and cross entropy of so many positions at a time, and again in backward; None: all at once."""


class OptimizerConfig(Section):
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "adam", "lion", "sgd", "adafactor"] = "adamw"
    """Adafactor looks beyond one element of a tensor and so runs on the ddp engine only, and with tp 1."""
    fused: bool | None = None
    """Update all tensors in one kernel (adamw, adam, sgd); None: where the optimizer and its device have one."""
    lr: Annotated[float, Field(gt=0.0, le=100.0)] = 2e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments (adamw, adam, lion)."""
    eps: Annotated[float, Field(ge=1e-30, le=1.0)] = 1e-8
    """Added to the denominator (adamw, adam)."""
    weight_decay: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Decoupled for adamw and lion, added to the gradient for adam and sgd."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum (sgd)."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to one-dimensional parameters (norms, biases) too."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e12)] = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    norm_type: Literal["l2", "inf"] = "l2"
    """Which norm is reported and clipped by; DeepSpeed knows l2 only."""


class ScheduleConfig(Section):
    """The learning rate by optimizer step."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up; `wsd` holds the peak and then decays linearly."""
    warmup_steps: NonNegativeInt | None = None
    """Optimizer steps of linear warm-up; None: from `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a share of all steps; None: no warm-up unless `warmup_steps` is set."""
    decay_ratio: Fraction = 0.2
    """Share of all steps in which `wsd` decays."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate after the last step, as a share of the peak."""


class RunSection(Section):
    """How long, where to, from which seed."""

    output_dir: Name = "outputs"
    """Folder for the exported model, the metrics and the plots."""
    epochs: PositiveInt | None = None
    """Passes over the data; None: 1, unless `max_steps` is set."""
    max_steps: PositiveInt | None = None
    """Optimizer steps; the run stops at the first of `epochs` and `max_steps`."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of the data order and of every random number."""
    device: Literal["cpu", "cuda"] | None = None
    """Device kind; None: cuda where there is one."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient leads to; the weights are untouched either way."""
    max_skipped_steps: PositiveInt = 5
    """Skipped steps in a row before the run stops; with fp16 on top of those that bring the loss scale down to 1."""
    stuck_timeout_s: Seconds = 20.0
    """When no rank has computed, read or written anything for so long, the run ends and names the stuck ones."""
    collective_timeout_s: Seconds = 1800.0
    """Longest time that ranks wait for one another in a collective; data preparation is no collective."""


class EvaluationConfig(Section):
    """When the evaluation data is run."""

    every_steps: PositiveInt | None = None
    """Evaluate after every so many optimizer steps."""
    at_start: bool = False
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    batch_size: BatchSize | None = None
    """Samples per forward pass of one rank; None: `batch.micro_size`."""
    generate_samples: NonNegativeInt = 0
    """Evaluation samples whose prompts are continued by greedy generation, printed and kept in `generations.jsonl`."""
    max_new_tokens: PositiveInt = 64
    """Longest continuation in tokens (`generate_samples`)."""
    metric_for_best_model: Name | None = None
    """Whose best step's checkpoint is kept: `eval_loss` (None, where it is needed) or a name of `compute_metrics`."""
    greater_is_better: bool | None = None
    """Whether more of that metric is better; None: unless its name ends in `loss`."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many evaluations in a row without a better metric; None: never."""
    early_stopping_threshold: Annotated[float, Field(ge=0.0, le=10**6)] = 0.0
    """How much better the metric must be to count."""


class CheckpointConfig(Section):
    """What is written, when, and what a run goes on from."""

    every_steps: NonNegativeInt = 500
    """Save a checkpoint after so many optimizer steps, and at the end of a run as long; 0: only when it is stopped."""
    keep_last: PositiveInt = 2
    """Checkpoints that are kept; the best one is kept besides."""
    resume: Name | None = None
    """`auto`: go on from the newest whole checkpoint in `run.output_dir`, if there is one; or a checkpoint's folder."""
    resume_weights_only: bool = False
    """Take only the weights of `resume`: any layout can read them; optimizer, schedule and data start anew."""
    allow_global_size_change: bool = False
    """Go on with another `batch.global_size`: at the same sample, with the steps that are left of the epochs."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What a full disk or a missing permission leads to; the checkpoint before is kept either way."""

    export: bool = True
    """Write the model as a Hugging Face folder at the end, to `<output_dir>/model`."""
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the exported weights; None: that of the checkpoint the run began with."""
    max_shard_size: str = "5GB"
    """Largest safetensors file."""
    load_best_model_at_end: bool = False
    """Export the best checkpoint's weights instead of the last step's."""


class LoggingConfig(Section):
    """What is shown and kept."""

    every_steps: PositiveInt = 1
    """Write a metrics line after every so many optimizer steps; its loss is the mean over that window."""
    progress_bar: bool = True
    """Show one progress bar on rank 0; false: print a line for every `every_steps` instead."""
    plots: bool = True
    """Draw the pictures of loss, learning rate, gradient norm, throughput and memory at the end."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get every metric, through accelerate."""
    project_name: Name = "ds_trainer"
    """The trackers' project or experiment."""
    run_name: Name | None = None
    """The run's name in the trackers; None: the name of `run.output_dir`."""


class NativeConfig(Section):
    """Raw keys handed to an engine, merged last."""

    deepspeed: dict[str, Any] = {}
    """DeepSpeed JSON; a key that contradicts the unified part is refused, as is one that DeepSpeed never reads."""


class RunConfig(Section):
    """One run of ds_trainer."""

    schema_: Annotated[str | None, Field(alias="$schema")] = None
    """Path or URL of the JSON Schema, for editors."""
    model: ModelConfig = ModelConfig()
    """Which checkpoint is trained."""
    data: DataConfig = DataConfig()
    """Training and evaluation data."""
    parallel: ParallelConfig = ParallelConfig()
    """Engine and parallelism."""
    zero: ZeroConfig = ZeroConfig()
    """DeepSpeed ZeRO and offload."""
    fsdp: FSDPConfig = FSDPConfig()
    """PyTorch FSDP2."""
    ddp: DDPConfig = DDPConfig()
    """PyTorch DDP."""
    accelerate: AccelerateConfig = AccelerateConfig()
    """accelerate."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes."""
    loss: LossConfig = LossConfig()
    """The loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and clipping."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    run: RunSection = RunSection()
    """Length, output, seed."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, resume and export."""
    logging: LoggingConfig = LoggingConfig()
    """Logging."""
    native: NativeConfig = NativeConfig()
    """Raw engine keys."""
