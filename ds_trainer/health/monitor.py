"""Keeps a run from hanging silently: notes where a rank is, and ends all ranks when an exception leaves one."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist

from ds_trainer.errors import RankFailedError, UserError
from ds_trainer.health.hang import Timeouts
from ds_trainer.health.local_peers import LocalPeers, PeerAddress
from ds_trainer.health.main_thread import MainThread
from ds_trainer.health.shared_status import SharedStatus
from ds_trainer.health.status import sample_text, stage_text
from ds_trainer.health.status_store import StatusStore
from ds_trainer.health.watchdog import Watchdog
from ds_trainer.torch_internals import default_store


class Monitor:
    """The training thread's side of the watchdog. A world of one has no watchdog.

    Args:
        rank: This rank.
        main: State of the training thread.
        watchdog: Watches this rank and the others; None in a world of one.
    """

    def __init__(self, rank: int, main: MainThread, watchdog: Watchdog | None = None) -> None:
        self._rank, self._main, self._watchdog = rank, main, watchdog

    def at(self, place: str, step: int | None = None, samples: Sequence[int] | None = None) -> None:
        """Notes where this rank is, within microseconds.

        Args:
            place: The part of the run, such as "step 4" or "evaluate()".
            step: The step, counted from 1; None: as before.
            samples: Its samples; None: as before.
        """
        here = self._main.position
        here.place = place
        if step is not None:
            here.step = step
        if samples is not None:
            here.samples = sample_text(samples)
        self._main.record()

    def runs_stages(self, stages: Sequence[int], of: int) -> None:
        """Notes this rank's pipeline stages, numbered from 0, of `of` stages."""
        self._main.position.stages = stage_text(stages, of) if of > 1 else ""
        self._main.record()

    def waiting_at(self, place: str) -> AbstractContextManager[None]:
        """Notes that this rank waits for the other ranks at a place."""
        return self._main.waiting_at(place)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Marks one of the trainer's calls. An exception that leaves it ends all ranks, and names step and samples.

        Raises:
            RankFailedError: Instead of a broken collective's exception, on one of the ranks: another rank ended.
            DesyncError: Likewise: the other rank ended in good order, without making this call.
        """
        with self._main.inside():
            try:
                yield
            except BaseException as error:
                if self._main.position.guard_depth == 1:
                    self._leave_with(error)
                raise

    def _leave_with(self, error: BaseException) -> None:
        ends_all = isinstance(error, UserError) and error.on_all_ranks
        if ends_all or isinstance(error, SystemExit | RankFailedError):
            return
        here = self._main.position
        if self._watchdog is not None:
            if _is_broken_collective(error) and (cause := self._watchdog.cause_of_broken_collective()) is not None:
                raise cause from None
            self._watchdog.report_own_failure()
        if here.step is not None:
            error.add_note(here.of(self._rank))

    def close(self) -> None:
        """Announces that this rank ends in good order; called at the interpreter's end."""
        if self._watchdog is not None:
            self._watchdog.close()

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """Replaces the watchdog's limits."""
        if self._watchdog is not None:
            self._watchdog.timeouts = timeouts


def start_monitor(group: dist.ProcessGroup, timeouts: Timeouts) -> Monitor:
    """Starts the watchdog of this rank.

    Comm: one gather of an object over `group`.

    Args:
        group: All ranks, for objects on the host.
        timeouts: How long is too long.
    """
    rank, world = group.rank(), group.size()
    if world == 1:
        return Monitor(rank, MainThread(None))
    shared = SharedStatus()
    main = MainThread(shared)
    main.record()
    addresses: list = [None] * world
    dist.all_gather_object(addresses, PeerAddress.of_this_process(shared.fd), group=group)
    store = StatusStore(default_store(), rank, world)
    watchdog = Watchdog(rank, world, main, store, LocalPeers(addresses, rank), timeouts)
    watchdog.start()
    monitor = Monitor(rank, main, watchdog)
    _close_at_exit(monitor)
    return monitor


def _close_at_exit(monitor: Monitor) -> None:
    """Closes the monitor at the interpreter's end, except in forked children, which have no watchdog thread."""
    pid = os.getpid()
    atexit.register(lambda: monitor.close() if os.getpid() == pid else None)


def _is_broken_collective(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; gloo says so only in the text of a RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
