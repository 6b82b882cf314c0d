"""What the thread that trains and the thread that watches it tell each other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ds_trainer.errors import DsTrainerError
from ds_trainer.health.rank_position import Whereabouts
from ds_trainer.health.shared_status import BlackBox
from ds_trainer.health.stacks import call_site, frame_of

_HAND_OVER_S = 1.0
"""A peer's end breaks its connections at once; a main thread that has not noticed by then is held by something else."""


class MainThread:
    """The state of the thread that trains.

    Args:
        box: Where its whereabouts are kept for other processes; None in a world of one.

    Attributes:
        whereabouts: Where it is.
        failing: It is on its way out of the trainer's calls, with an exception of its own.
    """

    def __init__(self, box: BlackBox | None) -> None:
        self.whereabouts = Whereabouts()
        self.failing = False
        self._box = box
        self._broke_at: tuple[str, str] | None = None
        self._id = threading.main_thread().ident
        self._agreeing_since: float | None = None
        self._cause: DsTrainerError | None = None
        self._has_cause, self._took_cause = threading.Event(), threading.Event()

    @property
    def id(self) -> int:
        """The thread that made the outermost of the trainer's calls last."""
        assert self._id is not None
        return self._id

    def record(self) -> None:
        """Makes the whereabouts outlive this process."""
        if self._box is not None:
            self._box.write(self.whereabouts)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """One of the trainer's calls."""
        self._id = threading.get_ident()
        self.whereabouts.guarded += 1
        self.record()
        try:
            yield
        finally:
            self.whereabouts.guarded -= 1
            if not self.whereabouts.guarded:
                self.failing, self._broke_at = False, None
            self.record()

    @contextmanager
    def waiting_at(self, place: str) -> Iterator[None]:
        """Waits for the other ranks at a named place."""
        self.whereabouts.agreement, self._agreeing_since = place, time.monotonic()
        try:
            yield
        except Exception:
            self._broke_at = place, call_site(sys._getframe())
            raise
        finally:
            self.whereabouts.agreement, self._agreeing_since = "", None

    def agreeing_s(self) -> float:
        """For how long it has waited there."""
        since = self._agreeing_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_stranded(self) -> bool:
        """Whether a collective of it broke, so that it wants to know why."""
        return self._broke_at is not None

    def strand(self) -> None:
        """A collective of it broke."""
        if self._broke_at is None:
            self._broke_at = self.whereabouts.place, call_site(sys._getframe())

    def meeting(self) -> tuple[str, str]:
        """Where it waits for the others, or did when that broke: the place's name, and file and line of the call."""
        here = self.whereabouts
        return self._broke_at or (here.agreement or here.place, call_site(frame_of(self.id)))

    def offer_cause(self, cause: DsTrainerError) -> bool:
        """From the watching thread: why its collective broke; returns whether it took that up and raises it."""
        self._cause = cause
        self._has_cause.set()
        return self._took_cause.wait(_HAND_OVER_S)

    def take_cause(self, seconds: float) -> DsTrainerError | None:
        """From the main thread: waits for the cause; None where none is known in time."""
        if not self._has_cause.wait(seconds):
            return None
        self._took_cause.set()
        return self._cause
