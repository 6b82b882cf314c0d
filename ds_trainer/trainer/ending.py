"""How a training ends: its last log lines, its callbacks, and the ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.distributed.store_barrier import barrier_before_exit
from ds_trainer.errors import DsTrainerError, UserError, report_error
from ds_trainer.launch import signals
from ds_trainer.log import get_logger


@contextmanager
def orderly_end(mesh: Mesh, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Reports an error that ends the training, closes the callbacks, and lets ranks that all end do so together.

    Args:
        mesh: Process groups.
        callbacks: The trainer's. They are closed after the monitor's guard, which is inside of this block: a tracker
            that is slow to end does not keep an error from the other ranks.
    """
    all_end = False
    try:
        yield
    except signals.StopRequested:
        all_end = True
        raise
    except DsTrainerError as error:
        report_error(error)  # At once: a launcher kills this rank as soon as another one has ended.
        all_end = isinstance(error, UserError) and error.on_all_ranks
        raise
    finally:
        for callback in callbacks:
            callback.close()
        if all_end:
            barrier_before_exit(mesh, "the end of train()")


@contextmanager
def stopping(mesh: Mesh, state: TrainerState) -> Iterator[None]:
    """Around the checkpoint of a run that a signal ends: says afterwards why it stopped and how it goes on.

    Comm: one gather of each rank's reason.
    """
    reasons = "; ".join(dict.fromkeys(filter(None, mesh.gather_over_world(signals.reason()))))
    yield
    text = "stopped by %s after step %d: checkpoint.resume = auto goes on from there (exit code %d)"
    get_logger().warning(text, reasons, state.global_step, signals.EXIT_CODE)
    signals.forget()


def log_idle_steps(state: TrainerState) -> None:
    """Warns of steps that have updated nothing."""
    for count, what in (
        (state.empty_steps, "had no label token"),
        (state.skipped_steps, "were dropped because they were not finite"),
    ):
        if count:
            get_logger().warning("warning: %d of %d steps %s", count, state.global_step, what)
