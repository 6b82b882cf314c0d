"""The progress of a run, and the requests of its callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ds_trainer.metrics import EvalMetrics, StepMetrics, from_line, to_line


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

    @property
    def training_loss(self) -> float:
        """Token mean of the loss over all logged steps; nan where none had a label token."""
        lines = [line for line in self.log_history if isinstance(line, StepMetrics) and line.loss is not None]
        num_tokens = sum(line.num_tokens for line in lines)
        return sum((line.loss or 0.0) * line.num_tokens for line in lines) / num_tokens if num_tokens else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the training under transformers' names; the time is that of the steps, without evaluations."""
        lines = [line for line in self.log_history if isinstance(line, StepMetrics)]
        before = [0, *(line.step for line in lines)]
        seconds = [line.step_s * (line.step - earlier) for line, earlier in zip(lines, before, strict=False)]
        if not (runtime := sum(seconds)):
            return {}
        samples = sum(line.samples_per_s * each for line, each in zip(lines, seconds, strict=True))
        return {
            "train_loss": self.training_loss,
            "train_runtime": runtime,
            "train_samples_per_second": samples / runtime,
            "train_steps_per_second": lines[-1].step / runtime,
            "epoch": self.epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        norm = self.grad_norm if math.isfinite(self.grad_norm) else None
        return kept | {"grad_norm": norm, "log_history": [to_line(metrics) for metrics in self.log_history]}

    def load_state_dict(self, state: Mapping[str, Any], planned_steps: int) -> None:
        """Sets what `state_dict` returned.

        Args:
            state: It, with the `planned_steps` of the run that saved it.
            planned_steps: Optimizer steps of this run by config and data; it has as many, unless it was planned as long
                before and a callback had ended it.
        """
        for f in fields(self):
            if f.name != "max_steps":
                setattr(self, f.name, state[f.name])
        self.grad_norm = math.inf if state["grad_norm"] is None else state["grad_norm"]
        self.log_history = [from_line(line) for line in state["log_history"]]
        ended_early = state["max_steps"] < state["planned_steps"] == planned_steps
        self.max_steps = state["max_steps"] if ended_early else planned_steps


@dataclass
class TrainerControl:
    """Requests of callbacks; names as in transformers' `TrainerControl`.

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
