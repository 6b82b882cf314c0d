"""The watchdog thread of a rank: reports its status, notices the end of other ranks, and ends this rank in time.

One rank reports a failure: the one that raised an exception, or the first that noticed the death of another. All other
ranks acknowledge the failure, wait until that rank has written its error and ended, and end without output. When a run
hangs, and which rank is to blame, is decided in `ds_trainer.health.hang`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from ds_trainer.errors import DesyncError, DsTrainerError, RankFailedError
from ds_trainer.health import stacks
from ds_trainer.health.activity import Activity
from ds_trainer.health.expected_wait import in_expected_wait
from ds_trainer.health.hang import Timeouts, find_hang
from ds_trainer.health.local_peers import LocalPeers
from ds_trainer.health.main_thread import MainThread
from ds_trainer.health.status import RankPosition, Status
from ds_trainer.health.status_store import StatusStore

TICK_S = 1.0
_POLL_S = 0.05
_GRACE_S = 1.0
"""Ranks that all hit the same fault raise it within this time of one another, and then end by themselves."""
_REPORT_S = 5.0
"""How long the others wait for the rank that reports a failure, and it for their acknowledgements."""
_STANDS_STILL_S = 2.0
_SILENT_S = 4.0
"""A rank on another machine is dead if its reports stop while connections break."""
_CAUSE_S = 8.0
"""The cause of a broken collective is known by then, or never."""


class Watchdog(threading.Thread):
    """Looks at its rank about once a second, and whenever the process of another rank on this machine ends.

    Args:
        rank: This rank.
        world: Number of ranks.
        main: The thread that trains.
        store: Statuses and failures of all ranks.
        peers: Ranks on this machine.
        timeouts: How long is too long.
    """

    def __init__(
        self, rank: int, world: int, main: MainThread, store: StatusStore, peers: LocalPeers, timeouts: Timeouts
    ) -> None:
        super().__init__(name="ds_trainer monitor", daemon=True)
        self.timeouts = timeouts
        self._rank, self._others = rank, set(range(world)) - {rank}
        self._on_other_machines = self._others - peers.local
        self._ended: dict[int, RankPosition | None] = {}
        self._main, self._store, self._peers = main, store, peers
        self._closing = self._store_is_lost = False
        self._beat = self._hangs_in_a_row = 0
        self._beats: dict[int, tuple[int, float]] = {}

    def run(self) -> None:
        """Watches until `close`."""
        self._activity = Activity()
        while not self._closing:
            status = self._status()
            if 0 in self._peers.ended:
                # It may have served the store. torch would print a stack trace if we tried to reach it.
                self._store_is_lost = True
            if not self._store_is_lost:
                try:
                    self._exchange_statuses(status)
                except dist.DistError:
                    self._store_is_lost = True
            if self._main.position.guard_depth and not self._main.failing:
                self._look_for_ended_ranks(status)
            self._peers.wait(TICK_S)

    def close(self) -> None:
        """Announces that this rank ends in good order, and stops the thread, which could abort the interpreter."""
        self._closing = True
        self._peers.wake()
        self.join(_REPORT_S)
        if not self._store_is_lost:
            try:
                self._store.mark_exited()
            except dist.DistError:
                self._store_is_lost = True  # Rank 0 has ended before, and no rank can read it any more.
        if not self.is_alive():
            self._peers.close()

    # What this rank reports to the others.

    def _status(self) -> Status:
        frame, waiting_s, idle_s = stacks.frame_of(self._main.id), self._main.waiting_s(), self._activity.idle_s()
        self._beat += 1
        return Status(
            beat=self._beat,
            position=dataclasses.replace(self._main.position),
            # In a consensus only the others' work counts: another thread of this rank may draw a progress bar.
            idle_s=max(idle_s, waiting_s),
            waits=waiting_s > 0 or stacks.waits_for_ranks(frame),
            expected_wait=in_expected_wait() or stacks.is_debugged(frame),
            doing=stacks.doing(frame),
            stack=stacks.stack_text(frame) if idle_s >= self.timeouts.stuck_s / 2 else "",
        )

    def _exchange_statuses(self, status: Status) -> None:
        self._store.publish(status)
        number, reporter = self._store.number, self._store.failure()
        if reporter is not None and reporter != self._rank:
            self._store.acknowledge(number)
            self._end_unless_failing(number, reporter)
        elif self._rank == 0 and reporter is None and not self._main.failing:
            self._check_for_hang()

    # What this rank finds out about the others.

    def _check_for_hang(self) -> None:
        """Ends the run if all ranks' reports show a hang twice in a row."""
        statuses = self._store.statuses()
        for rank, status in statuses.items():
            if not self._is_fresh(rank, status):
                statuses[rank] = dataclasses.replace(status, idle_s=0.0)
        hang = find_hang(statuses, self.timeouts) if statuses else None
        self._hangs_in_a_row = self._hangs_in_a_row + 1 if hang is not None else 0
        if hang is not None and self._hangs_in_a_row > 1:
            self._end_with(hang.error, hang.stacks)

    def _is_fresh(self, rank: int, status: Status | None) -> bool:
        """Whether a rank's latest report is new, or was new a moment ago."""
        beat, now = status.beat if status is not None else 0, time.monotonic()
        known, since = self._beats.get(rank, (None, now))
        if beat != known:
            self._beats[rank] = beat, now
        return beat != known or now - since < _SILENT_S

    def _look_for_ended_ranks(self, status: Status) -> None:
        stands_still = self._main.has_broken_collective or (status.waits and status.idle_s >= _STANDS_STILL_S)
        self._ended |= self._peers.ended
        if stands_still and not self._store_is_lost:
            self._ended |= self._ended_elsewhere()
        if stands_still and self._store_is_lost and 0 in self._on_other_machines:
            self._ended[0] = None  # It, or another process on its machine that serves the store, has ended.
        for rank, last in self._ended.items():
            if last is not None and last.guard_depth:
                self._end_with(_died(rank, last))
                return
        if self._ended and stands_still:
            self._end_with(self._desync_error())

    def _ended_elsewhere(self) -> dict[int, RankPosition | None]:
        """Ranks on other machines that have announced their end, or whose reports stopped once a connection broke."""
        ended: dict[int, RankPosition | None] = {}
        try:
            for rank in self._on_other_machines:
                status = self._store.status(rank)
                if self._store.has_exited(rank):
                    ended[rank] = None
                elif self._main.has_broken_collective and not self._is_fresh(rank, status):
                    ended[rank] = status.position if status is not None else None
        except dist.DistError:
            self._store_is_lost = True
        return ended

    # How this rank ends.

    def report_own_failure(self) -> None:
        """From the main thread, which is about to raise: ends all other ranks, and keeps them from reporting it too."""
        self._main.failing = True
        number, _ = self._announce(time.sleep)
        self._store.advance_past(number)

    def cause_of_broken_collective(self) -> DsTrainerError | None:
        """From the main thread, on which a collective broke: why it did; None if that stays unknown.

        Does not return where another rank reports the failure: this process then ends without output.
        """
        self._main.mark_broken_collective()
        return self._main.wait_for_cause(_CAUSE_S)

    def _announce(self, pause: Callable[[float], None]) -> tuple[int, int]:
        """Claims the right to report a failure; if granted, waits until the other ranks know that they are not to.

        Returns:
            The failure's number, and the rank that reports it.
        """
        number = self._store.number
        if not self._store_is_lost:
            try:
                reporter = self._store.claim_failure()
                if reporter != self._rank:
                    self._store.acknowledge(number)
                else:
                    self._wait_for_acknowledgements(number, pause)
                return number, reporter
            except dist.DistError:
                self._store_is_lost = True
        return number, min({self._rank, *self._peers.local} - set(self._peers.ended))

    def _wait_for_acknowledgements(self, number: int, pause: Callable[[float], None]) -> None:
        deadline = time.monotonic() + _REPORT_S
        for rank in self._others:
            while not (
                rank in self._ended
                or rank in self._peers.ended
                or self._store.has_acknowledged(number, rank)
                or self._store.has_exited(rank)
            ):
                if time.monotonic() > deadline:
                    return
                pause(_POLL_S)

    def _end_with(self, error: DsTrainerError, stacks_text: str = "") -> None:
        number, reporter = self._announce(self._peers.wait)
        if reporter != self._rank:
            self._end_unless_failing(number, reporter)
        elif not self._main.hand_over_cause(error):
            _end_process(f"{stacks_text}\nerror: {error}\n", error.exit_code)

    def _end_unless_failing(self, number: int, reporter: int) -> None:
        """Ends this process after the reporter, unless its main thread is about to end by itself."""
        now = time.monotonic()
        grace, deadline = now + _GRACE_S, now + _GRACE_S + _REPORT_S
        while self._main.position.guard_depth and not self._main.failing:
            now = time.monotonic()
            if now > deadline or (now > grace and self._has_ended(reporter)):
                _end_process("", 1)
            time.sleep(_POLL_S)
        self._store.advance_past(number)

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended, its report written; on other machines its announcement has to do."""
        if rank in self._peers.local:
            self._peers.wait(0)
            return rank in self._peers.ended
        if self._store_is_lost:
            return True
        try:
            return self._store.has_exited(rank)
        except dist.DistError:
            self._store_is_lost = True
            return True

    def _desync_error(self) -> DesyncError:
        place, site = self._main.waiting_place()
        ended, entered = sorted(self._ended), sorted({self._rank, *self._others} - set(self._ended))
        have = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {ended} have"
        return DesyncError.entered_by_some(place, entered, site, f"{have} ended")


def _died(rank: int, last: RankPosition) -> RankFailedError:
    return RankFailedError(
        f"{last.of(rank)}: its process ended without a word (killed? out of memory? os._exit?)",
        "ranks wait for one another, so none can go on without it",
        "look at what it printed, and at the kernel's log if memory ran out: dmesg | grep -i 'killed process'",
    )


def _end_process(text: str, code: int) -> None:
    """Writes a text and ends this process at once: its main thread may never run again."""
    # In a thread of its own, since the main thread may be writing to the same stream and hold its lock.
    writer = threading.Thread(target=_write, args=(text,), daemon=True)
    writer.start()
    writer.join(_GRACE_S)
    os._exit(code)


def _write(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
