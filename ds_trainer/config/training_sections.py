"""The sections of a run's JSON about training: batch, loss, optimizer, schedule, evaluation, checkpoints. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_trainer.config.field_types import BatchSize, Fraction, Name, NonNegativeInt, PositiveInt, Seconds, Section


class BatchConfig(Section):
    """global_size = micro_size x accumulation x data-parallel ranks: set as many as determine the rest."""

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
    """Adafactor looks at whole matrices and so runs on the ddp engine only, and with tp 1."""
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
    """Warm-up as a fraction of all steps; None: no warm-up unless `warmup_steps` is set."""
    decay_ratio: Fraction = 0.2
    """Fraction of all steps in which `wsd` decays."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate after the last step, as a fraction of the peak."""


class RunSection(Section):
    """Length of the run, output folder, seed and timeouts."""

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
    """Reaction to a NaN or infinite loss or gradient; the weights are untouched either way."""
    max_skipped_steps: PositiveInt = 5
    """Skipped steps in a row before the run stops; with fp16 on top of those that bring the loss scale down to 1."""
    stuck_timeout_s: Seconds = 20.0
    """If no rank computes, reads or writes anything for so long, the run ends and names the stuck ranks."""
    collective_timeout_s: Seconds = 1800.0
    """Longest time that ranks wait for one another in a collective; data preparation is not one."""


class EvaluationConfig(Section):
    """When the model is evaluated, and how."""

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
    """Metric that decides which checkpoint is best: `eval_loss` (None, where needed) or a name of `compute_metrics`."""
    greater_is_better: bool | None = None
    """Whether a larger metric is better; None: unless its name ends in `loss`."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many evaluations in a row without a better metric; None: never."""
    early_stopping_threshold: Annotated[float, Field(ge=0.0, le=10**6)] = 0.0
    """How much better the metric must be to count."""


class CheckpointConfig(Section):
    """What is saved, when, and what a run resumes from."""

    every_steps: NonNegativeInt = 500
    """Save a checkpoint after so many optimizer steps, and at the end of a run as long; 0: only when it is stopped."""
    keep_last: PositiveInt = 2
    """Checkpoints that are kept, besides the best one."""
    resume: Name | None = None
    """`auto`: resume from the newest complete checkpoint in `run.output_dir`, if any; or the folder of a checkpoint."""
    resume_weights_only: bool = False
    """Load only the weights of `resume`, in any layout; optimizer, schedule and data start anew."""
    allow_global_size_change: bool = False
    """Resume with another `batch.global_size`: at the same sample, with the remaining steps of the epochs."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """Reaction to a full disk or a missing permission; the previous checkpoint is kept either way."""

    export: bool = True
    """Write the model as a Hugging Face folder at the end, to `<output_dir>/model`."""
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the exported weights; None: that of the checkpoint the run began with."""
    max_shard_size: str = "5GB"
    """Largest safetensors file."""
    load_best_model_at_end: bool = False
    """Put the best checkpoint's weights in memory after the last step, and export them."""


class LoggingConfig(Section):
    """What is printed, drawn and sent to trackers."""

    every_steps: PositiveInt = 1
    """Write a metrics line after every so many optimizer steps; its loss is the mean over that window."""
    progress_bar: bool = True
    """Show one progress bar on rank 0; false: print a line for every `every_steps` instead."""
    plots: bool = True
    """Draw the pictures of loss, learning rate, gradient norm, throughput and memory at the end."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that receive every metric, through accelerate."""
    project_name: Name = "ds_trainer"
    """The trackers' project or experiment."""
    run_name: Name | None = None
    """The run's name in the trackers; None: the name of `run.output_dir`."""
