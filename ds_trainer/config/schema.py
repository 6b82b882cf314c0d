"""A run's JSON as one object. `None` means: derived at resolve time, with its reason. Pure.

Keys, their defaults and their doc lines are in `input_sections`, `engine_sections` and `training_sections`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_trainer.config.engine_sections import (
    AccelerateConfig,
    DDPConfig,
    FSDPConfig,
    NativeConfig,
    ParallelConfig,
    PrecisionConfig,
    ZeroConfig,
)
from ds_trainer.config.field_types import Section
from ds_trainer.config.input_sections import DataConfig, ModelConfig
from ds_trainer.config.training_sections import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    LossConfig,
    OptimizerConfig,
    RunSection,
    ScheduleConfig,
)


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
    """Dtypes and loss scale."""
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
