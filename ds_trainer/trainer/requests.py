"""What callbacks and signals request at the end of a step, the same on every rank."""

from __future__ import annotations

from dataclasses import astuple

from ds_trainer.callbacks.trainer_state import TrainerControl
from ds_trainer.distributed.consensus import agree
from ds_trainer.distributed.process_groups import Mesh


def agree_on_requests(control: TrainerControl, mesh: Mesh, step: int) -> tuple[TrainerControl, bool]:
    """Brings the requests of all ranks together.

    Args:
        control: This rank's callbacks' requests.
        mesh: The ranks.
        step: Optimizer steps taken.

    Comm: one consensus of all ranks.

    Returns:
        What any rank's callbacks request, and whether a signal asks any rank to stop.
    """
    outcome = agree(mesh, f"the end of step {step}", *astuple(control))
    return TrainerControl(*(count > 0 for count in outcome.sums)), outcome.stop
