"""The attributes of transformers' `TrainingArguments` that have an equal in a run's config."""

from __future__ import annotations

import json
from typing import Any

from ds_trainer.config.keys import value
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.interop.hf.fields import KEY_OF_FIELD
from ds_trainer.launch.rank_grid import Grid


class NoSuchArgument(ConfigError, AttributeError):
    """A callback reads an attribute of `TrainingArguments` that has no equal in this run's config."""


class Arguments:
    """Takes the place of `TrainingArguments` in the calls of callbacks, which only read it.

    Args:
        config: The run's config, resolved.
        grid: Where this rank is.
        max_steps: Optimizer steps of the run.
        num_epochs: Passes over the training data, rounded up.
    """

    def __init__(self, config: RunConfig, grid: Grid, max_steps: int, num_epochs: int) -> None:
        from transformers.trainer_utils import IntervalStrategy

        steps, never = IntervalStrategy.STEPS, IntervalStrategy.NO
        beta1, beta2 = config.optimizer.betas
        for name, key in KEY_OF_FIELD.items():
            setattr(self, name, value(config, key))
        self.adam_beta1, self.adam_beta2 = beta1, beta2
        self.bf16, self.fp16 = config.precision.dtype == "bf16", config.precision.dtype == "fp16"
        self.disable_tqdm = not config.logging.progress_bar
        self.eval_strategy = steps if config.evaluation.every_steps else never
        self.logging_strategy = steps
        self.local_process_index, self.process_index, self.world_size = grid.local_rank, grid.rank, grid.world
        self.max_steps, self.num_train_epochs = max_steps, num_epochs
        self.report_to = list(config.logging.report_to)
        self.save_strategy = steps if config.checkpoint.every_steps else never
        self.use_cpu = config.run.device == "cpu"

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that do not exist.

        Raises:
            NoSuchArgument: Always; `hasattr` and `getattr` with a default treat it as an AttributeError.
        """
        raise NoSuchArgument(
            f"a callback reads args.{name}",
            f"args holds those of TrainingArguments that have an equal in the config: {', '.join(sorted(vars(self)))}",
            "read the run's own config: make the callback a ds_trainer.Callback and use trainer.config",
        )

    def to_dict(self) -> dict[str, Any]:
        """Every attribute by name."""
        return dict(vars(self))

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Every attribute by name, as a number or text."""
        return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Every attribute as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)
