"""The trainer's part of a checkpoint: progress, data position, states of loop and callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ds_trainer.callbacks.base import Callback, restore_states, states_of
from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.engines.base import Engine
from ds_trainer.metrics import WindowMean
from ds_trainer.trainer.non_finite import NonFinitePolicy
from ds_trainer.trainer.run import Run


class HasProgress(Protocol):
    """What of a trainer goes into a checkpoint."""

    run: Run
    engine: Engine
    state: TrainerState
    window: WindowMean
    non_finite: NonFinitePolicy
    callbacks: list[Callback]
    lr_scheduler: Any
    optimizer_is_given: bool

    def planned_steps(self) -> int:
        """Optimizer steps of the run by config and data."""


def progress_of(trainer: HasProgress) -> dict[str, Any]:
    """The trainer's part of a checkpoint, as JSON."""
    loader, scheduler = trainer.run.training_data(), trainer.lr_scheduler
    # The state of an optimizer of the user's beside its parameters; the config says it for the others.
    groups = trainer.engine.param_groups() if trainer.optimizer_is_given else []
    return {
        **trainer.state.state_dict(),
        "planned_steps": trainer.planned_steps(),
        "data": {**loader.sampler.state_dict(), "probes": trainer.run.data_probes},
        "window": trainer.window.state_dict(),
        "skipped_in_a_row": trainer.non_finite.in_a_row,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "optimizer_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "callbacks": states_of(trainer.callbacks),
    }


def restore_progress(trainer: HasProgress, saved: Mapping[str, Any]) -> None:
    """Sets what `progress_of` returned."""
    # The sampler first: how many steps are planned depends on where it goes on.
    trainer.run.training_data().sampler.load_state_dict(saved["data"], saved["global_step"])
    trainer.state.load_state_dict(saved, trainer.planned_steps())
    trainer.window.load_state_dict(saved["window"])
    trainer.non_finite.in_a_row = saved["skipped_in_a_row"]
    if trainer.lr_scheduler is not None:
        trainer.lr_scheduler.load_state_dict(saved["scheduler"])
    for group, values in zip(trainer.engine.param_groups(), saved["optimizer_groups"], strict=False):
        group.update(values)
    restore_states(trainer.callbacks, saved["callbacks"])
