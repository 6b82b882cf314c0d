"""The thread that looks after a rank: tells the others about it, learns of their end, and ends this one in time.

A failure is told by one rank, last: the one that raised an exception, or the first that learned of another's death.
Whoever else learns of it acknowledges, waits until that rank has spoken, and ends without a word.
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
from ds_trainer.health.local_peers import Peers
from ds_trainer.health.main_thread import MainThread
from ds_trainer.health.rank_position import Whereabouts
from ds_trainer.health.status import Status, Timeouts, judge
from ds_trainer.health.status_store import Board

TICK_S = 1.0
_POLL_S = 0.05
_GRACE_S = 1.0
"""Ranks that all meet the same fault raise it within this time of one another, and are then left to themselves."""
_LAST_WORDS_S = 5.0
_STANDS_STILL_S = 2.0
_SILENT_S = 4.0
"""A rank on another machine that reports no more, while connections break, is dead."""
_CAUSE_S = 8.0
"""By then a broken collective's cause is known, or nobody will know it."""


class Watcher(threading.Thread):
    """Looks after one rank, about once a second and whenever a process of a rank on this machine ends.

    Args:
        rank: This rank.
        world: Number of ranks.
        main: The thread that trains.
        board: Words between ranks.
        peers: Ranks on this machine.
        timeouts: How long is too long.
    """

    def __init__(self, rank: int, world: int, main: MainThread, board: Board, peers: Peers, timeouts: Timeouts) -> None:
        super().__init__(name="ds_trainer monitor", daemon=True)
        self.timeouts = timeouts
        self._rank, self._others = rank, set(range(world)) - {rank}
        self._elsewhere = self._others - peers.local
        self._gone: dict[int, Whereabouts | None] = {}
        self._main, self._board, self._peers = main, board, peers
        self._closing = self._store_is_lost = False
        self._beat = self._verdicts = 0
        self._beats: dict[int, tuple[int, float]] = {}

    def run(self) -> None:
        """Watches until `close`."""
        self._activity = Activity()
        while not self._closing:
            status = self._status()
            if 0 in self._peers.gone:
                # It may have held the store. torch would print a stack trace at the attempt to reach it.
                self._store_is_lost = True
            if not self._store_is_lost:
                try:
                    self._talk(status)
                except dist.DistError:
                    self._store_is_lost = True
            if self._main.whereabouts.guarded and not self._main.failing:
                self._look_for_the_gone(status)
            self._peers.wait(TICK_S)

    def close(self) -> None:
        """Says that this rank ends in good order, and ends the thread: at the interpreter's end it could abort it."""
        self._closing = True
        self._peers.wake()
        self.join(_LAST_WORDS_S)
        if not self._store_is_lost:
            try:
                self._board.leave()
            except dist.DistError:
                self._store_is_lost = True  # Rank 0 has ended before, and nobody is left to read it.
        if not self.is_alive():
            self._peers.close()

    # What this rank tells the others.

    def _status(self) -> Status:
        frame, agreeing_s, idle_s = stacks.frame_of(self._main.id), self._main.agreeing_s(), self._activity.idle_s()
        self._beat += 1
        return Status(
            beat=self._beat,
            whereabouts=dataclasses.replace(self._main.whereabouts),
            # In an agreement only the others' work counts, though a thread beside may draw a progress bar.
            idle_s=max(idle_s, agreeing_s),
            waits=agreeing_s > 0 or stacks.waits_for_ranks(frame),
            patient=in_expected_wait() or stacks.is_debugged(frame),
            doing=stacks.doing(frame),
            stack=stacks.stack_text(frame) if idle_s >= self.timeouts.stuck_s / 2 else "",
        )

    def _talk(self, status: Status) -> None:
        self._board.publish(status)
        number, speaker = self._board.number, self._board.failure()
        if speaker is not None and speaker != self._rank:
            self._board.acknowledge(number)
            self._end_unless_failing(number, speaker)
        elif self._rank == 0 and speaker is None and not self._main.failing:
            self._judge_all()

    # What this rank learns of the others.

    def _judge_all(self) -> None:
        """Ends the run if all ranks' reports say so twice in a row."""
        statuses = self._board.statuses()
        for rank, status in statuses.items():
            if not self._is_fresh(rank, status):
                statuses[rank] = dataclasses.replace(status, idle_s=0.0)
        verdict = judge(statuses, self.timeouts) if statuses else None
        self._verdicts = self._verdicts + 1 if verdict is not None else 0
        if verdict is not None and self._verdicts > 1:
            self._end_by(verdict.error, verdict.stacks)

    def _is_fresh(self, rank: int, status: Status | None) -> bool:
        """Whether a rank's latest report is new, or was so a moment ago."""
        beat, now = status.beat if status is not None else 0, time.monotonic()
        known, since = self._beats.get(rank, (None, now))
        if beat != known:
            self._beats[rank] = beat, now
        return beat != known or now - since < _SILENT_S

    def _look_for_the_gone(self, status: Status) -> None:
        stands_still = self._main.is_stranded or (status.waits and status.idle_s >= _STANDS_STILL_S)
        self._gone |= self._peers.gone
        if stands_still and not self._store_is_lost:
            self._gone |= self._gone_elsewhere()
        if stands_still and self._store_is_lost and 0 in self._elsewhere:
            self._gone[0] = None  # It, or whatever else on its machine holds the store, has ended.
        for rank, last in self._gone.items():
            if last is not None and last.guarded:
                self._end_by(_died(rank, last))
                return
        if self._gone and stands_still:
            self._end_by(self._left_alone())

    def _gone_elsewhere(self) -> dict[int, Whereabouts | None]:
        """Ranks on other machines that have said they end, or, once a connection broke, say nothing any more."""
        gone: dict[int, Whereabouts | None] = {}
        try:
            for rank in self._elsewhere:
                status = self._board.status(rank)
                if self._board.has_left(rank):
                    gone[rank] = None
                elif self._main.is_stranded and not self._is_fresh(rank, status):
                    gone[rank] = status.whereabouts if status is not None else None
        except dist.DistError:
            self._store_is_lost = True
        return gone

    # How it ends.

    def report_own_failure(self) -> None:
        """From the main thread, which is about to raise: makes all others end, and lets them know before it speaks."""
        self._main.failing = True
        number, _ = self._announce(time.sleep)
        self._board.past(number)

    def cause_of_break(self) -> DsTrainerError | None:
        """From the main thread, a collective of which broke: why; None where nobody knows.

        Does not return where another rank speaks: this process then ends without a word.
        """
        self._main.strand()
        return self._main.take_cause(_CAUSE_S)

    def _announce(self, pause: Callable[[float], None]) -> tuple[int, int]:
        """Claims the right to speak, and if it gets it waits until the others know that they are to be silent.

        Returns:
            The failure's number, and the rank that speaks.
        """
        number = self._board.number
        if not self._store_is_lost:
            try:
                speaker = self._board.report_failure()
                if speaker != self._rank:
                    self._board.acknowledge(number)
                else:
                    self._wait_for_acknowledgements(number, pause)
                return number, speaker
            except dist.DistError:
                self._store_is_lost = True
        return number, min({self._rank, *self._peers.local} - set(self._peers.gone))

    def _wait_for_acknowledgements(self, number: int, pause: Callable[[float], None]) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        for rank in self._others:
            while not (
                rank in self._gone
                or rank in self._peers.gone
                or self._board.has_acknowledged(number, rank)
                or self._board.has_left(rank)
            ):
                if time.monotonic() > deadline:
                    return
                pause(_POLL_S)

    def _end_by(self, error: DsTrainerError, stacks_text: str = "") -> None:
        number, speaker = self._announce(self._peers.wait)
        if speaker != self._rank:
            self._end_unless_failing(number, speaker)
        elif not self._main.offer_cause(error):
            _end_process(f"{stacks_text}\nerror: {error}\n", error.exit_code)

    def _end_unless_failing(self, number: int, speaker: int) -> None:
        """Ends this process after the speaker, unless its main thread is on its way out by itself."""
        now = time.monotonic()
        grace, deadline = now + _GRACE_S, now + _GRACE_S + _LAST_WORDS_S
        while self._main.whereabouts.guarded and not self._main.failing:
            now = time.monotonic()
            if now > deadline or (now > grace and self._has_ended(speaker)):
                _end_process("", 1)
            time.sleep(_POLL_S)
        self._board.past(number)

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended, by which time it has spoken; of other machines' its word must do."""
        if rank in self._peers.local:
            self._peers.wait(0)
            return rank in self._peers.gone
        if self._store_is_lost:
            return True
        try:
            return self._board.has_left(rank)
        except dist.DistError:
            self._store_is_lost = True
            return True

    def _left_alone(self) -> DesyncError:
        place, site = self._main.meeting()
        ended, entered = sorted(self._gone), sorted({self._rank, *self._others} - set(self._gone))
        have = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {ended} have"
        return DesyncError(
            f"{place} was entered by ranks {entered} only, at {site}; {have} ended",
            "all ranks meet there, and wait for one another",
            "make this call on every rank; what is written is written by rank 0 by itself",
        )


def _died(rank: int, last: Whereabouts) -> RankFailedError:
    return RankFailedError(
        f"{last.of(rank)}: its process ended without a word (killed? out of memory? os._exit?)",
        "ranks wait for one another, so that none can go on without it",
        "look at what it printed, and for the kernel's word on memory: dmesg | grep -i 'killed process'",
    )


def _end_process(text: str, code: int) -> None:
    """Ends this process at once, with a few words: its main thread may never run again."""
    # In a thread of its own, since the main thread may stand inside the very stream and hold its lock.
    last_words = threading.Thread(target=_say, args=(text,), daemon=True)
    last_words.start()
    last_words.join(_GRACE_S)
    os._exit(code)


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
