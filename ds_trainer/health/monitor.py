"""No silent hang: what a rank says of itself, and how an exception leaves it, so that all ranks end with its cause."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_trainer.errors import RankFailedError, UserError
from ds_trainer.health.local_peers import Introduction, Peers
from ds_trainer.health.main_thread import MainThread
from ds_trainer.health.rank_position import sample_text, stage_text
from ds_trainer.health.shared_status import BlackBox
from ds_trainer.health.status import Timeouts
from ds_trainer.health.status_store import Board
from ds_trainer.health.watchdog import Watcher


class Monitor:
    """The training thread's side of the watch over its rank. In a world of one nobody watches.

    Args:
        rank: This rank.
        main: State of the training thread.
        watcher: Looks after it; None in a world of one.
    """

    def __init__(self, rank: int, main: MainThread, watcher: Watcher | None = None) -> None:
        self._rank, self._main, self._watcher = rank, main, watcher

    def at(self, place: str, step: int | None = None, samples: Sequence[int] | None = None) -> None:
        """Notes where this rank is: a matter of microseconds.

        Args:
            place: The part of the run, such as "step 4" or "evaluate()".
            step: The step, counted from 1; None: as before.
            samples: Its samples; None: as before.
        """
        here = self._main.whereabouts
        here.place = place
        if step is not None:
            here.step = step
        if samples is not None:
            here.samples = sample_text(samples)
        self._main.record()

    def runs_stages(self, stages: Sequence[int], of: int) -> None:
        """Notes which stages of a pipeline of so many are this rank's, numbered from 0."""
        self._main.whereabouts.stages = stage_text(stages, of) if of > 1 else ""
        self._main.record()

    def waiting_at(self, place: str) -> AbstractContextManager[None]:
        """Notes that this rank waits for the others at a place."""
        return self._main.waiting_at(place)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """One of the trainer's calls: an exception that leaves it ends all ranks, and tells step and samples.

        Raises:
            RankFailedError: Instead of a broken collective's exception, on one of the ranks: another rank ended.
            DesyncError: Likewise: the other rank ended in good order, without making this call.
        """
        with self._main.inside():
            try:
                yield
            except BaseException as error:
                if self._main.whereabouts.guarded == 1:
                    self._leave_with(error)
                raise

    def _leave_with(self, error: BaseException) -> None:
        ends_all = isinstance(error, UserError) and error.on_all_ranks
        if ends_all or isinstance(error, SystemExit | RankFailedError):
            return
        here = self._main.whereabouts
        if self._watcher is not None:
            if _is_broken_collective(error) and (cause := self._watcher.cause_of_break()) is not None:
                raise cause from None
            self._watcher.report_own_failure()
        if here.step is not None:
            error.add_note(here.of(self._rank))

    def close(self) -> None:
        """Says that this rank ends in good order; called at the interpreter's end."""
        if self._watcher is not None:
            self._watcher.close()

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """Replaces the limits."""
        if self._watcher is not None:
            self._watcher.timeouts = timeouts


def start_monitor(group: dist.ProcessGroup, timeouts: Timeouts) -> Monitor:
    """Starts the watch over this rank.

    Comm: one gather of an object over `group`.

    Args:
        group: All ranks, for objects on the host.
        timeouts: How long is too long.
    """
    rank, world = group.rank(), group.size()
    if world == 1:
        return Monitor(rank, MainThread(None))
    box = BlackBox()
    main = MainThread(box)
    main.record()
    introductions: list = [None] * world
    dist.all_gather_object(introductions, Introduction.of_this_process(box.fd), group=group)
    board = Board(_get_default_store(), rank, world)
    watcher = Watcher(rank, world, main, board, Peers(introductions, rank), timeouts)
    watcher.start()
    monitor = Monitor(rank, main, watcher)
    _close_at_exit(monitor)
    return monitor


def _close_at_exit(monitor: Monitor) -> None:
    """Not in forked children, which have no such thread."""
    pid = os.getpid()
    atexit.register(lambda: monitor.close() if os.getpid() == pid else None)


def _is_broken_collective(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; gloo says so in the text of a RuntimeError only."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
