"""The callback protocol, named as transformers' `TrainerCallback`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.view import TrainerView
from ds_trainer.log import warn_once
from ds_trainer.metrics import EvalMetrics, StepMetrics


class Callback:
    """Base class: every method does nothing. All ranks call every method; requests go to `trainer.control`."""

    def on_init_end(self, trainer: TrainerView) -> None:
        """After the Trainer has been set up."""

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Before the first step; a resumed run has its checkpoint's state already."""

    def on_step_begin(self, trainer: TrainerView) -> None:
        """Before a step's first forward pass."""

    def on_pre_optimizer_step(self, trainer: TrainerView) -> None:
        """After the last backward pass, before clipping and the update; gradients are complete here."""

    def on_step_end(self, trainer: TrainerView) -> None:
        """After every optimizer step; `trainer.state` holds its loss and gradient norm."""

    def on_log(self, trainer: TrainerView, metrics: StepMetrics) -> None:
        """After every `logging.every_steps` steps, with the token-weighted loss of that window."""

    def on_prediction_step(self, trainer: TrainerView) -> None:
        """After each forward pass of an evaluation or a prediction."""

    def on_evaluate(self, trainer: TrainerView, metrics: EvalMetrics) -> None:
        """After an evaluation; `trainer.state` still holds the best metric of the evaluations before."""

    def on_predict(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        """After a prediction."""

    def on_save(self, trainer: TrainerView, folder: Path) -> None:
        """After a checkpoint has been saved completely."""

    def on_epoch_begin(self, trainer: TrainerView) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """After the last step of an epoch."""

    def on_interrupt(self, trainer: TrainerView) -> None:
        """After a signal has ended the training and its checkpoint is saved."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """After the last step; not where a signal or an error ended the training."""

    def close(self) -> None:
        """Releases what the callback holds, however the training ended."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the callback, as JSON; rank 0's is saved in every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, on every rank and before `on_train_begin`."""


def states_of(callbacks: Sequence[Callback]) -> dict[str, list[dict[str, Any]]]:
    """Class name -> states of the callbacks of that class, in order; callbacks without a state are left out."""
    states: dict[str, list[dict[str, Any]]] = {}
    for callback in callbacks:
        if state := callback.state_dict():
            states.setdefault(type(callback).__name__, []).append(state)
    return states


def restore_states(callbacks: Sequence[Callback], states: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Loads what `states_of` returned: the nth state of a class into the nth callback of that class."""
    left = {name: list(each) for name, each in states.items()}
    for callback in callbacks:
        if left.get(type(callback).__name__):
            callback.load_state_dict(left[type(callback).__name__].pop(0))
    if unused := [name for name, each in left.items() if each]:
        warn_once(f"the checkpoint holds a state of {', '.join(unused)}, which this run does not have")
