"""State that the thread that trains and the watchdog thread share."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ds_trainer.errors import DsTrainerError
from ds_trainer.health.shared_status import SharedStatus
from ds_trainer.health.stacks import call_site, frame_of
from ds_trainer.health.status import RankPosition

_HAND_OVER_S = 1.0
"""A peer's end breaks its connections at once; a main thread that has not noticed by then is blocked elsewhere."""


class MainThread:
    """The state of the thread that trains.

    Args:
        shared: Memory in which other processes can read its position; None in a world of one.

    Attributes:
        position: Where it is.
        failing: Whether an exception of its own is about to leave the trainer's calls.
    """

    def __init__(self, shared: SharedStatus | None) -> None:
        self.position = RankPosition()
        self.failing = False
        self._shared = shared
        self._broke_at: tuple[str, str] | None = None
        self._id = threading.main_thread().ident
        self._waiting_since: float | None = None
        self._cause: DsTrainerError | None = None
        self._has_cause, self._took_cause = threading.Event(), threading.Event()

    @property
    def id(self) -> int:
        """Identifier of the thread that made the latest of the trainer's outermost calls."""
        assert self._id is not None
        return self._id

    def record(self) -> None:
        """Writes the position to where it outlives this process."""
        if self._shared is not None:
            self._shared.write(self.position)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Marks one of the trainer's calls."""
        self._id = threading.get_ident()
        self.position.guard_depth += 1
        self.record()
        try:
            yield
        finally:
            self.position.guard_depth -= 1
            if not self.position.guard_depth:
                self.failing, self._broke_at = False, None
            self.record()

    @contextmanager
    def waiting_at(self, place: str) -> Iterator[None]:
        """Marks a wait for the other ranks at a named place."""
        self.position.waiting_at, self._waiting_since = place, time.monotonic()
        try:
            yield
        except Exception:
            self._broke_at = place, call_site(sys._getframe())
            raise
        finally:
            self.position.waiting_at, self._waiting_since = "", None

    def waiting_s(self) -> float:
        """For how long it has waited for the other ranks; 0 where it does not."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def has_broken_collective(self) -> bool:
        """Whether a collective broke on this thread, so that it waits for the cause."""
        return self._broke_at is not None

    def mark_broken_collective(self) -> None:
        """Notes that a collective broke on this thread."""
        if self._broke_at is None:
            self._broke_at = self.position.place, call_site(sys._getframe())

    def waiting_place(self) -> tuple[str, str]:
        """Name of the place where it waits for the other ranks, or did when that broke, and file:line of the call."""
        here = self.position
        return self._broke_at or (here.waiting_at or here.place, call_site(frame_of(self.id)))

    def hand_over_cause(self, cause: DsTrainerError) -> bool:
        """From the watchdog: why the collective broke. Returns whether the main thread took it to raise it."""
        self._cause = cause
        self._has_cause.set()
        return self._took_cause.wait(_HAND_OVER_S)

    def wait_for_cause(self, seconds: float) -> DsTrainerError | None:
        """From the main thread: waits for the cause of a broken collective; None if none is known in time."""
        if not self._has_cause.wait(seconds):
            return None
        self._took_cause.set()
        return self._cause
