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
        log_history: Every logged line and evaluation.
    """

    max_steps: int
    global_step: int = 0
    epoch: float = 0.0
    loss: float | None = None
    grad_norm: float = 0.0
    empty_steps: int = 0
    skipped_steps: int = 0
    log_history: list[StepMetrics | EvalMetrics] = field(default_factory=list)
