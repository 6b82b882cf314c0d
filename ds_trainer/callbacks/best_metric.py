"""Compares evaluations by `evaluation.metric_for_best_model`."""

from __future__ import annotations

import json
import math

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.metrics import EvalMetrics


def metric_value(metrics: EvalMetrics, name: str) -> float:
    """One metric of an evaluation, named with or without `eval_`, as `evaluation.metric_for_best_model` names it.

    Raises:
        ConfigError: The evaluation does not have it.
    """
    given = {"eval_loss": metrics.eval_loss, **metrics.extra}
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in given:
        raise ConfigError(
            f"evaluation.metric_for_best_model = {name}, and the evaluation has {', '.join(given)}",
            "the best model is found by a metric that every evaluation has",
            "set evaluation.metric_for_best_model to one of those, or return it from compute_metrics",
        )
    return given[key]


def require_evaluations(config: RunConfig, has_data: bool) -> None:
    """Refuses to look for the best model where nothing is evaluated.

    Raises:
        ConfigError: There is no evaluation data, and a key needs it.
    """
    evaluation = config.evaluation
    needing = {
        "checkpoint.load_best_model_at_end": config.checkpoint.load_best_model_at_end,
        "evaluation.early_stopping_patience": evaluation.early_stopping_patience,
        "evaluation.metric_for_best_model": evaluation.metric_for_best_model,
    }
    for key, value in needing.items():
        if value and not has_data:
            raise ConfigError(
                f"{key} is {json.dumps(value)}, and there is no evaluation data",
                "the best model is found among the evaluations",
                f"set data.eval, pass Trainer(eval_dataset=...), or remove {key}",
            )


def is_better(value: float, best: float | None, greater_is_better: bool, threshold: float = 0.0) -> bool:
    """Whether a value beats the best one so far by more than the threshold; NaN never does.

    Args:
        value: Metric of an evaluation.
        best: Best value of the evaluations before; None before the first.
        greater_is_better: Whether more is better.
        threshold: Gain that does not count yet.
    """
    if best is None:
        return not math.isnan(value)
    return (value - best if greater_is_better else best - value) > threshold
