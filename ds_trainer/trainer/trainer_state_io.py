"""The trainer's part of a checkpoint, as JSON: where the run is, and what its loop and its callbacks remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.base import restore_states, states_of

if TYPE_CHECKING:
    from ds_trainer.trainer.trainer import Trainer


def take_snapshot(trainer: Trainer) -> dict[str, Any]:
    """Everything that the trainer itself needs to go on."""
    loader, scheduler = trainer.run.train_loader, trainer.lr_scheduler
    assert loader is not None
    return {
        **trainer.state.state_dict(),
        "planned_steps": trainer.planned_steps(),
        "data": {**loader.sampler.state_dict(), "probes": trainer.run.data_probes},
        "window": trainer.window.state_dict(),
        "skipped_in_a_row": trainer.non_finite.in_a_row,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "optimizer_groups": _groups(trainer) if trainer.optimizer_is_given else [],
        "callbacks": states_of(trainer.callbacks),
    }


def put_back(trainer: Trainer, snapshot: Mapping[str, Any]) -> None:
    """Sets what `take_snapshot` returned."""
    loader, state = trainer.run.train_loader, trainer.state
    assert loader is not None
    state.load_state_dict(snapshot)
    loader.sampler.load_state_dict(snapshot["data"], state.global_step)
    state.max_steps = trainer.planned_steps()
    if snapshot["max_steps"] < snapshot["planned_steps"] == state.max_steps:
        state.max_steps = snapshot["max_steps"]  # A callback had ended the run.
    trainer.window.load_state_dict(snapshot["window"])
    trainer.non_finite.in_a_row = snapshot["skipped_in_a_row"]
    if trainer.lr_scheduler is not None:
        trainer.lr_scheduler.load_state_dict(snapshot["scheduler"])
    for group, saved in zip(trainer.engine.param_groups(), snapshot["optimizer_groups"], strict=False):
        group.update(saved)
    restore_states(trainer.callbacks, snapshot["callbacks"])


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    """What an optimizer of the user's keeps beside its parameters; the config says it for the others."""
    return [{k: v for k, v in group.items() if k != "params"} for group in trainer.engine.param_groups()]
