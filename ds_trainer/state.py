"""Where a run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_trainer.metrics import EvalMetrics, StepMetrics


@dataclass
class TrainerState:
    """Names as in transformers' `TrainerState`.

    Args:
        max_steps: Optimizer steps of the run.
        global_step: Optimizer steps taken.
        epoch: Passes over the training data, with a fraction.
        loss: Token mean of the last step's loss; None before the first and where a step had no label token.
        grad_norm: Global gradient norm of the last step before clipping; inf where it was not finite.
        empty_steps: Steps without any label token: nothing was updated, schedule and data moved on.
        skipped_steps: Steps dropped because loss or gradient was not finite.
        best_metric: Best value so far of `evaluation.metric_for_best_model`.
        best_global_step: The step at which it was found.
        best_model_checkpoint: The checkpoint of that step.
        log_history: Every logged line and evaluation.
    """

    max_steps: int
    global_step: int = 0
    epoch: float = 0.0
    loss: float | None = None
    grad_norm: float = 0.0
    empty_steps: int = 0
    skipped_steps: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: list[StepMetrics | EvalMetrics] = field(default_factory=list)


@dataclass
class TrainerControl:
    """What a callback asks for; names as in transformers' `TrainerControl`.

    A callback may set a flag on one rank or on all: ranks agree on it at the end of the step, and then it is cleared.

    Args:
        should_training_stop: End the training after this step, as if it were the last one.
        should_save: Save a checkpoint after this step.
        should_evaluate: Evaluate after this step.
        should_log: Log after this step, whatever `logging.every_steps` says.
    """

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
