"""The arguments of `Trainer`: the config in any of its forms, and the user's objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_trainer.config.backend import backend
from ds_trainer.config.io import load_config
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.interop.hf.fields import TRAINING_ARGUMENTS, with_field_names
from ds_trainer.interop.hf.importer import from_hf
from ds_trainer.launch.environment import grid_from_environment
from ds_trainer.log import get_logger
from ds_trainer.models.torch_wrappers import unwrapped_model
from ds_trainer.optim import LOOK_AT_FULL_TENSORS
from ds_trainer.torch_internals import remove_hooks

if TYPE_CHECKING:
    from transformers import TrainingArguments

ConfigSource = str | Path | dict | RunConfig | tuple[RunConfig, dict[str, str]]


def loaded_config(
    config: ConfigSource | None, args: TrainingArguments | None, model: Any, train_dataset: Any = None
) -> tuple[RunConfig, dict[str, str]]:
    """The config and where its keys come from; a checkpoint handed as `model` replaces `model.path`.

    Raises:
        ConfigErrors: Every fault of the config.
        ConfigError: There are two, or it is of a wrong type.
    """
    if config is not None and not isinstance(config, str | Path | dict | RunConfig | tuple):
        raise ConfigError(
            f"Trainer(model, config, ...) holds {type(config).__name__} as its config",
            "a config is a path, a dict, a RunConfig or what load_config returned; transformers' arguments go by name",
            "pass Trainer(model=..., args=..., train_dataset=...), each argument with its name",
        )
    if config is not None and args is not None:
        raise ConfigError(
            "Trainer(config=..., args=...) holds a config and TrainingArguments",
            "one of them says how to train",
            "pass one; what TrainingArguments cannot say is said by a config alone",
        )
    if args is not None:
        config = config_of_arguments(args, train_dataset)
    run_config, origins = config if isinstance(config, tuple) else load_config({} if config is None else config)
    if isinstance(model, str | Path):
        said = f" (instead of {run_config.model.path})" if run_config.model.path else ""
        section = run_config.model.model_copy(update={"path": str(model)})
        run_config = run_config.model_copy(update={"model": section})
        origins = origins | {"model.path": f"Trainer(model=...){said}"}
    return run_config, origins


def instance_of(model: Any) -> nn.Module | None:
    """The model instance among `Trainer(model=...)`, out of torch's wrappers around it; None: it is none."""
    if not isinstance(model, nn.Module):
        return None
    inside = unwrapped_model(model)
    if inside is not model:
        text = "the model inside %s is trained: parallel.engine and model.compile say how it is wrapped"
        get_logger().info(text, type(model).__name__)
    if isinstance(model, DistributedDataParallel):
        remove_hooks(model)
    return inside


def config_of_arguments(args: TrainingArguments, train_dataset: Any = None) -> tuple[RunConfig, dict[str, str]]:
    """The config that transformers' arguments mean, and the field that each key comes from.

    Arguments that mean something else here, or nothing, are logged.

    Args:
        args: The arguments.
        train_dataset: What is trained on: its size says how many steps an epoch is.

    Raises:
        ConfigErrors: They ask for something that cannot be.
    """
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"Trainer(args=...) holds {type(args).__name__}",
            "args are transformers' TrainingArguments",
            "pass a path, a dict or a RunConfig as config",
        )
    # From here on DeepSpeed is ours: under ZeRO-3 transformers would build each model in pieces already.
    unset_hf_deepspeed_config()
    usual = {field.name: field.default for field in fields(args)} | {
        name: TRAINING_ARGUMENTS[name].default for name in TRAINING_ARGUMENTS
    }
    said = {
        name: item for name, item in args.to_dict().items() if getattr(args, name) is not None and item != usual[name]
    }
    if args.parallelism_config is not None:  # An object, which to_dict() leaves out.
        sizes = vars(args.parallelism_config).items()
        said["parallelism_config"] = {name: size for name, size in sizes if name.endswith("_size") and size != 1}
    found = from_hf(said, _steps_per_epoch(args, train_dataset))
    for line in (*found.of("changed"), *found.of("dropped")):
        led_to = f" -> {', '.join(line.ours)}" if line.ours else ""
        get_logger().info(
            "TrainingArguments.%s is %s%s: %s", line.key, line.outcome, led_to, with_field_names(line.note)
        )
    places = {key: f"TrainingArguments.{line.key}" for line in found.lines for key in line.ours}
    return load_config(found.tree, made_from=places)


def _steps_per_epoch(args: TrainingArguments, train_dataset: Any) -> int | None:
    """Steps of one pass, where the samples are counted already: paths are not read yet."""
    if not isinstance(train_dataset, Sized) or isinstance(train_dataset, str):
        return None
    dp_size = grid_from_environment().world // getattr(args.parallelism_config, "tp_size", 1)
    global_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size
    return math.ceil(len(train_dataset) / global_size) or None


@dataclass(frozen=True)
class TrainerInputs:
    """The user's objects, which `Trainer` takes beside the config."""

    model: nn.Module | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    data_collator: Callable | None = None
    compute_loss_func: Callable | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None

    def check(self, config: RunConfig) -> None:
        """Checks that the user's objects work with one another and with the config.

        Raises:
            ConfigError: They do not.
        """
        offload = config.zero.offload_optimizer.device
        self._check_evaluation(config)
        if self.model is not None and any(hasattr(parameter, "ds_id") for parameter in self.model.parameters()):
            raise ConfigError(
                "the model handed to Trainer was built in pieces, by transformers' ZeRO-3 or deepspeed.zero.Init",
                "ds_trainer shards a full model, or loads each rank's shard of a checkpoint",
                "hand over the checkpoint's path, or build the model before TrainingArguments(deepspeed=...)",
            )
        names = [] if self.model is None else [name for name, _ in self.model.named_modules()]
        if backend(config) == "deepspeed" and config.zero.stage == 3 and any("_orig_mod" in name for name in names):
            raise ConfigError(
                "the model handed to Trainer has layers compiled by torch.compile, with zero.stage = 3",
                "the hooks of ZeRO-3 gather the parameters of a layer, and torch.compile's wrapper does not take them",
                "set model.compile to true and hand over the layers as they are, or set zero.stage to 2",
            )
        if self.optimizer is not None and self.model is None:
            raise ConfigError(
                "Trainer(optimizers=...) holds an optimizer, and the model is not an instance",
                "an optimizer is built on the parameters it updates",
                "pass Trainer(model=instance, optimizers=...), or use the optimizer section of the config",
            )
        if self.optimizer is not None and config.parallel.pp > 1:
            raise ConfigError(
                f"Trainer(optimizers=...) with parallel.pp = {config.parallel.pp}",
                "a rank of a pipeline has some layers only, and the optimizer was built on all of them",
                "set parallel.pp to 1, or use the optimizer section of the config",
            )
        if self.optimizer is not None and config.parallel.tp > 1:
            raise ConfigError(
                f"Trainer(optimizers=...) with parallel.tp = {config.parallel.tp}",
                "tensor parallelism replaces the parameters that the optimizer was built on by shards",
                "set parallel.tp to 1, or use the optimizer section of the config",
            )
        if self.optimizer is not None and backend(config) == "deepspeed" and offload != "none":
            raise ConfigError(
                f"Trainer(optimizers=...) with zero.offload_optimizer.device = {offload}",
                "offloaded state is updated by DeepSpeed's own CPU optimizer",
                "set zero.offload_optimizer.device to none, or use the optimizer section of the config",
            )
        name = type(self.optimizer).__name__
        sharded = backend(config) == "fsdp2" or (backend(config) == "deepspeed" and config.zero.stage > 0)
        if name in LOOK_AT_FULL_TENSORS and sharded:
            raise ConfigError(
                f"Trainer(optimizers=...) holds {name}, with parallel.engine {config.parallel.engine!r}",
                f"{name} needs full tensors, which {'ZeRO' if backend(config) == 'deepspeed' else 'FSDP2'} shards",
                "set parallel.engine to ddp, or pass another optimizer",
            )
        if self.scheduler is not None and self.optimizer is None:
            raise ConfigError(
                "Trainer(optimizers=...) holds a scheduler without its optimizer",
                "a scheduler sets the rates of the optimizer it was built on",
                "pass both, or use the schedule section of the config",
            )

    def _check_evaluation(self, config: RunConfig) -> None:
        if isinstance(self.eval_dataset, dict):
            raise ConfigError(
                f"Trainer(eval_dataset=...) holds {len(self.eval_dataset)} data sets by name",
                "the best model is found and the run is stopped early by one evaluation set",
                "pass one of them, and the others to evaluate(eval_dataset={...}), such as in a callback's on_evaluate",
            )
        has_data = self.eval_dataset is not None or config.data.eval is not None
        evaluates = has_data and config.evaluation.every_steps is not None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and not evaluates:
            raise ConfigError(
                "Trainer(optimizers=...) holds a ReduceLROnPlateau, and nothing is evaluated between steps",
                "it steps at evaluations, by evaluation.metric_for_best_model or else the loss",
                "set evaluation.every_steps, and data.eval or Trainer(eval_dataset=...)",
            )
