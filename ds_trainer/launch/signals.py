"""Signals that ask a run to stop: noted at once, acted on by all ranks together at the next boundary.

A signal may reach only one rank, at any moment, even inside a collective. So its handler only notes the request; the
next consensus of all ranks spreads it, and every rank then saves one checkpoint and exits with `EXIT_CODE`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from ds_trainer.log import get_logger
from ds_trainer.processes import has_ended

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: try again later. A scheduler can restart the run on it, which resumes."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed.run", "accelerate", "--nproc")
_SECOND_INTERRUPT_S = 1.0
"""Launchers send SIGTERM right after a terminal's SIGINT; a person's second Ctrl-C comes later."""


class StopRequested(SystemExit):
    """A signal ended the run in good order; a script that does not catch it exits with `EXIT_CODE`, without a trace."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class _Requests:
    """What signals have asked of this process since it began to listen."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.interrupted_at: float | None = None
        self.launchers: list[psutil.Process] = []
        self.listening = False


_requests = _Requests()


def pending() -> bool:
    """Whether this rank was asked to stop: by a signal, or by the end of the launcher that started it."""
    if _requests.reason is None and any(map(has_ended, _requests.launchers)):
        _request_stop("the end of its launcher")
    return _requests.reason is not None


def reason() -> str | None:
    """Why this rank was asked to stop, as text; None if it was not."""
    return _requests.reason


@contextmanager
def listening() -> Iterator[None]:
    """Notes signals instead of dying from them; does nothing outside the main thread, where Python has no handlers."""
    if _requests.listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ignored signals stay ignored: nohup lets a run outlive its terminal.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _handle) for number in handled}
    _requests.listening = True
    _requests.launchers = _launchers()
    try:
        yield
    finally:
        _requests.listening = False
        _requests.launchers = []
        for number, handler in before.items():
            signal.signal(number, handler)


def forget() -> None:
    """Forgets a request that has been acted on."""
    _requests.reason = _requests.interrupted_at = None


def _handle(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        now = time.monotonic()
        if _requests.interrupted_at is not None and now - _requests.interrupted_at > _SECOND_INTERRUPT_S:
            raise KeyboardInterrupt
        _requests.interrupted_at = _requests.interrupted_at or now
    if _requests.reason is None:
        _request_stop(signal.Signals(number).name)


def _request_stop(reason: str) -> None:
    _requests.reason = reason
    again = "; Ctrl-C again ends at once, without a checkpoint" if reason == "SIGINT" else ""
    get_logger().warning("%s: the run stops at the next boundary%s", reason, again)


def _launchers() -> list[psutil.Process]:
    """Ancestors that are launchers, nearest first: a signal that kills one of them leaves its ranks behind."""
    if "RANK" not in os.environ:
        return []
    found = []
    for ancestor in psutil.Process().parents():
        try:
            program, *arguments = ancestor.cmdline() or [""]
        except psutil.Error:
            break
        # A shell that runs a script of such a name is no launcher: its end means nothing.
        if not Path(program).name.startswith("python") or not any(n in a for n in _LAUNCHERS for a in arguments):
            break
        found.append(ancestor)
    return found
