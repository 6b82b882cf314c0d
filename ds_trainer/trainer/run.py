"""A run that has been set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ds_trainer.checkpoint.verified import VerifiedCheckpoint
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.loader_factory import LoaderFactory
from ds_trainer.data.prompts import Prompt
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine, EngineFacts
from ds_trainer.errors import ConfigError
from ds_trainer.executors.base import Executor
from ds_trainer.loss import LossFunction


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run that is ready to take its first step.

    Args:
        resolved: The config without open values.
        mesh: Process groups and device.
        model: This rank's shard of the model.
        tokenizer: None: the run has none.
        loaders: Makes loaders of further data sets.
        engine: Holds the model and the optimizer.
        loss: Sums the losses of a micro-batch.
        executor: Runs the micro-batches of a step.
        train_loader: Training data; None: the run has none.
        eval_loader: Evaluation data; None: the run has none.
        eval_prompts: Beginnings of evaluation samples, which the model continues in each evaluation.
        facts: What the engine was measured to be.
        export_dtype: Dtype of the exported weights: the config's, or that of the checkpoint or instance the run began
            with.
        data_probes: Digests of the first, middle and last training sample; None where they cannot be compared.
        num_trained: Elements of the trained parameters of the full model.
        checkpoint: What the run goes on from; its weights are in the engine already.
    """

    resolved: ResolvedConfig
    mesh: Mesh
    model: Any
    tokenizer: Any
    loaders: LoaderFactory
    engine: Engine
    loss: LossFunction
    executor: Executor
    train_loader: BatchLoader | None
    eval_loader: BatchLoader | None
    eval_prompts: list[Prompt]
    facts: EngineFacts
    export_dtype: torch.dtype
    data_probes: tuple[str | None, ...] | None
    num_trained: int
    checkpoint: VerifiedCheckpoint | None

    def planned_steps(self) -> int:
        """Optimizer steps by config and training data; 0 without training data."""
        if self.train_loader is None:
            return 0
        sampler, config = self.train_loader.sampler, self.resolved.config.run
        bounds = [config.max_steps, sampler.steps_of(config.epochs) if config.epochs is not None else None]
        return min(bound for bound in bounds if bound is not None)

    def training_data(self) -> BatchLoader:
        """The loader of the training data.

        Raises:
            ConfigError: The run has none.
        """
        if self.train_loader is None:
            raise ConfigError(
                "there is no training data",
                "training needs data.train or Trainer(train_dataset=...)",
                "set data.train to json, jsonl or parquet files",
            )
        return self.train_loader

    def close(self) -> None:
        """Releases the engine's files and hooks, and ends the data workers."""
        self.engine.close()
        for loader in (self.train_loader, self.eval_loader):
            if loader is not None:
                loader.close()
