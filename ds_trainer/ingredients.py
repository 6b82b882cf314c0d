"""What a user hands to `Trainer`: the config in any of its forms, and objects of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.config.backend import backend
from ds_trainer.config.io import load_config
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.optim import LOOK_AT_WHOLE_TENSORS

ConfigSource = str | Path | dict | RunConfig | tuple[RunConfig, dict[str, str]]


def loaded_config(config: ConfigSource | None, model: Any) -> tuple[RunConfig, dict[str, str]]:
    """The config and where its keys come from; a checkpoint handed as `model` replaces `model.path`."""
    run_config, origins = config if isinstance(config, tuple) else load_config({} if config is None else config)
    if isinstance(model, str | Path):
        said = f" (instead of {run_config.model.path})" if run_config.model.path else ""
        section = run_config.model.model_copy(update={"path": str(model)})
        run_config = run_config.model_copy(update={"model": section})
        origins = origins | {"model.path": f"Trainer(model=...){said}"}
    return run_config, origins


@dataclass(frozen=True)
class Ingredients:
    """What the user handed to `Trainer`, beside the config."""

    model: nn.Module | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    data_collator: Callable | None = None
    compute_loss_func: Callable | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None

    def check(self, config: RunConfig) -> None:
        """An optimizer of the user's needs a model of theirs, and its state must be able to live where the config says.

        Raises:
            ConfigError: It cannot.
        """
        offload = config.zero.offload_optimizer.device
        if self.optimizer is not None and self.model is None:
            raise ConfigError(
                "Trainer(optimizers=...) holds an optimizer, and the model is not an instance",
                "an optimizer is built on the parameters it updates",
                "pass Trainer(model=instance, optimizers=...), or use the optimizer section of the config",
            )
        if self.optimizer is not None and backend(config) == "deepspeed" and offload != "none":
            raise ConfigError(
                f"Trainer(optimizers=...) with zero.offload_optimizer.device = {offload}",
                "offloaded state is updated by DeepSpeed's own CPU optimizer",
                "set zero.offload_optimizer.device to none, or use the optimizer section of the config",
            )
        name = type(self.optimizer).__name__
        cut = backend(config) == "fsdp2" or (backend(config) == "deepspeed" and config.zero.stage > 0)
        if name in LOOK_AT_WHOLE_TENSORS and cut:
            raise ConfigError(
                f"Trainer(optimizers=...) holds {name}, with parallel.engine {config.parallel.engine!r}",
                f"{name} looks at whole tensors, which {'ZeRO' if backend(config) == 'deepspeed' else 'FSDP2'} cuts",
                "set parallel.engine to ddp, or pass another optimizer",
            )
        if self.scheduler is not None and self.optimizer is None:
            raise ConfigError(
                "Trainer(optimizers=...) holds a scheduler without its optimizer",
                "a scheduler sets the rates of the optimizer it was built on",
                "pass both, or use the schedule section of the config",
            )
