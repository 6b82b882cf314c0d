"""Ends a training whose evaluations no longer improve."""

from __future__ import annotations

import math
from typing import Any

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.best_metric import is_better, metric_value
from ds_trainer.callbacks.view import TrainerView
from ds_trainer.config.training_sections import EvaluationConfig
from ds_trainer.log import get_logger
from ds_trainer.metrics import EvalMetrics


class EarlyStoppingCallback(Callback):
    """Stops after `early_stopping_patience` evaluations in a row without a better metric.

    Works as transformers' callback of that name: a gain of at most the threshold does not reset the count, but the new
    value is the one to beat from then on. Every rank has one and gets the same metrics.

    Args:
        config: Evaluation section, resolved.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        assert config.metric_for_best_model is not None and config.greater_is_better is not None
        assert config.early_stopping_patience is not None
        self._metric, self._greater_is_better = config.metric_for_best_model, config.greater_is_better
        self._patience, self._threshold = config.early_stopping_patience, config.early_stopping_threshold
        self._best: float | None = None
        self._without_gain = 0

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Requests the end at once where the resumed run had been stopped by this callback."""
        trainer.control.should_training_stop |= self._without_gain >= self._patience

    def on_evaluate(self, trainer: TrainerView, metrics: EvalMetrics) -> None:
        """Counts evaluations without a gain, and requests the end of the training after too many.

        Raises:
            ConfigError: The evaluation does not have the metric.
        """
        value = metric_value(metrics, self._metric)
        gained = is_better(value, self._best, self._greater_is_better, self._threshold)
        self._without_gain = 0 if gained else self._without_gain + 1
        if is_better(value, self._best, self._greater_is_better):
            self._best = value
        if self._without_gain >= self._patience:
            best = math.nan if self._best is None else self._best
            text = "step %d: early stopping, evaluations in a row without a better %s than %.4g: %d"
            get_logger().info(text, metrics.step, self._metric, best, self._without_gain)
            trainer.control.should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The best value and the evaluations since."""
        return {"best": self._best, "without_gain": self._without_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the count of the checkpoint's run."""
        self._best, self._without_gain = state["best"], state["without_gain"]
