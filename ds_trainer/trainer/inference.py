"""Evaluation of a run's evaluation data, and predictions on any other data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_trainer.data.consistency import check_same_dataset
from ds_trainer.distributed.consensus import agree
from ds_trainer.errors import ConfigError
from ds_trainer.metrics import EvalMetrics
from ds_trainer.trainer.eval_samples import Generation, continue_samples
from ds_trainer.trainer.evaluation import prediction_metrics, run_evaluation
from ds_trainer.trainer.run import Run


def evaluate(
    run: Run, step: int, compute_metrics: Callable | None, after_microbatch: Callable[[], None]
) -> tuple[EvalMetrics, list[Generation]]:
    """Runs the evaluation data once, and continues the prompts of `evaluation.generate_samples`; a collective.

    Args:
        run: The run.
        step: Optimizer steps taken.
        compute_metrics: The user's `f(EvalPrediction) -> dict`.
        after_microbatch: Called for every micro-batch that has been evaluated.

    Raises:
        ConfigError: There is no evaluation data.
    """
    if run.eval_loader is None:
        raise ConfigError(
            "there is no evaluation data",
            "evaluation needs data.eval or Trainer(eval_dataset=...)",
            "set data.eval to json, jsonl or parquet files",
        )
    agree(run.mesh, "evaluate()")
    result = run_evaluation(run, run.eval_loader, compute_metrics is not None, after_microbatch)
    # Before the evaluation counts as done: one that a stop interrupts is repeated when the run goes on.
    generations = continue_samples(run, step)
    extra = prediction_metrics(result, compute_metrics, "eval")
    return EvalMetrics(step, result.loss, result.num_tokens, result.seconds, extra), generations


def evaluate_others(
    run: Run, datasets: Any, prefix: str, compute_metrics: Callable | None, after_microbatch: Callable[[], None]
) -> dict[str, float]:
    """Losses and metrics of another data set, or of several, of which each name follows the prefix; a collective.

    Args:
        run: The run.
        datasets: A data set of the same kind of records as the training data, or a dict of them by name.
        prefix: Begins the name of every metric.
        compute_metrics: The user's `f(EvalPrediction) -> dict`.
        after_microbatch: Called for every micro-batch that has been evaluated.
    """
    if isinstance(datasets, dict):
        found: dict[str, float] = {}
        for name, dataset in datasets.items():
            found |= evaluate_others(run, dataset, f"{prefix}_{name}", compute_metrics, after_microbatch)
        return found
    agree(run.mesh, "evaluate()")
    loader = run.loaders.test(datasets)
    check_same_dataset(loader, run.mesh, "test")
    result = run_evaluation(run, loader, compute_metrics is not None, after_microbatch)
    return {f"{prefix}_loss": result.loss, **prediction_metrics(result, compute_metrics, prefix)}


def predict(run: Run, dataset: Any, compute_metrics: Callable | None, after_microbatch: Callable[[], None]) -> Any:
    """Logits of a data set, in its order; a collective.

    Args:
        run: The run.
        dataset: Data set of the same kind of records as the training data.
        compute_metrics: The user's `f(EvalPrediction) -> dict`.
        after_microbatch: Called for every micro-batch that has been predicted.

    Returns:
        transformers' `PredictionOutput`.
    """
    from transformers.trainer_utils import PredictionOutput

    agree(run.mesh, "predict()")
    loader = run.loaders.test(dataset)
    check_same_dataset(loader, run.mesh, "test")
    result = run_evaluation(run, loader, True, after_microbatch)
    assert result.predictions is not None
    metrics = {"test_loss": result.loss, **prediction_metrics(result, compute_metrics, "test")}
    return PredictionOutput(result.predictions, result.label_ids, metrics)
