"""The learning rate of the coming step, set on the engine's parameter groups."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ds_trainer.callbacks.best_metric import metric_value
from ds_trainer.config.training_sections import ScheduleConfig
from ds_trainer.engines.base import Engine
from ds_trainer.metrics import EvalMetrics
from ds_trainer.optim import lr_factor


class LearningRate:
    """Follows the config's schedule, or a scheduler of the user's.

    Args:
        config: The config's schedule section, resolved.
        engine: Its parameter groups have the rates that the schedule's factor multiplies.
        scheduler: The user's, whose `step()` is called once per optimizer step, or for a
            `ReduceLROnPlateau` once per evaluation; None: the config's schedule applies.
    """

    def __init__(self, config: ScheduleConfig, engine: Engine, scheduler: Any) -> None:
        self._config, self._engine, self._scheduler = config, engine, scheduler
        self._base = [group["lr"] for group in engine.param_groups()]

    def start(self, step: int, max_steps: int) -> None:
        """Sets the rate of the first step of this process; a scheduler of the user's has set it already."""
        if self._scheduler is None:
            self._follow_config(step, max_steps)

    def after_step(self, step: int, max_steps: int) -> None:
        """Sets the rate of the coming step; after the last one it stays at the schedule's end.

        Args:
            step: Optimizer steps taken.
            max_steps: Optimizer steps of the run.
        """
        if self._scheduler is None:
            self._follow_config(step, max_steps)
        elif not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def after_evaluation(self, metrics: EvalMetrics, name: str | None) -> None:
        """Tells a scheduler of the user's that follows a metric of it, as an evaluation is its step.

        Args:
            metrics: The evaluation's.
            name: The metric; None: the loss.
        """
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(metric_value(metrics, name or "eval_loss"))

    def _follow_config(self, step: int, max_steps: int) -> None:
        factor = lr_factor(self._config, step, max_steps)
        for group, base in zip(self._engine.param_groups(), self._base, strict=True):
            group["lr"] = base * factor
