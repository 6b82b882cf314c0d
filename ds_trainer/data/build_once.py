"""One process builds a folder, the others wait: on a lock file, never on a collective that could time out.

Beside the folder `data` lie `data.lock`, which the builder holds; `data.part`, which it fills; and what it has to tell
those that wait: `data.error`, why it failed, and `data.stop`, that a signal asked one of the processes to stop.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ds_trainer.data.folder_integrity import damage, seal
from ds_trainer.errors import DataError
from ds_trainer.launch import signals
from ds_trainer.log import get_logger

POLL_S = 0.2
PATIENCE_S = 10.0

StopCheck = Callable[[], None]


def build_once(target: Path, build: Callable[[Path, StopCheck], None]) -> None:
    """Makes `target` exist, whichever of many processes gets to it first.

    The builder holds a lock that the kernel frees when its process ends, so a killed builder is replaced at once and a
    slow one can take any time. It writes to a folder aside, renamed when complete: `target` is whole or absent. One
    that has lost files, or parts of them, since is made anew.

    Args:
        target: Folder to make.
        build: Fills the empty folder it is given. Its second argument is to be called every now and then: it raises
            `StopRequested` when a signal has asked a process that builds or waits to stop.

    Raises:
        DataError: `build` raised it, in this process or in the one waited for; the text is the same.
        StopRequested: A signal has asked this process to stop, or one that it waits for or that waits for it.
    """
    if _is_whole(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_suffix(".lock"))
    failure, stop = target.with_suffix(".error"), target.with_suffix(".stop")
    waited = False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waited = True
        _wait(lock, target, stop)
    try:
        if _is_whole(target):
            return
        if waited and failure.exists():
            raise DataError(*json.loads(failure.read_text("utf-8")))
        if waited and stop.exists():
            raise signals.StopRequested
        failure.unlink(missing_ok=True)
        stop.unlink(missing_ok=True)
        _build(target, build, failure, stop)
    finally:
        lock.release()


def _is_whole(target: Path) -> bool:
    return target.is_dir() and damage(target) is None


def _wait(lock: FileLock, target: Path, stop: Path) -> None:
    """Waits for the builder, passing a stop on to it; says so only when it is slow: its own bar is on the terminal."""
    patience_ends: float | None = time.monotonic() + PATIENCE_S
    while True:
        try:
            lock.acquire(timeout=POLL_S, poll_interval=POLL_S)
            return
        except Timeout:
            if signals.pending():
                stop.touch()  # The builder may be done before it looks, and then all go on: so it is waited for.
        if patience_ends is not None and time.monotonic() > patience_ends:
            get_logger().info("waiting for another process to make %s", target)
            patience_ends = None


def _build(target: Path, build: Callable[[Path, StopCheck], None], failure: Path, stop: Path) -> None:
    if target.is_dir():
        get_logger().warning("warning: %s; it is made anew", damage(target))
        shutil.rmtree(target)
    aside = target.with_suffix(".part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a builder that was killed
    aside.mkdir()
    try:
        build(aside, _stop_check(stop))
    except DataError as error:
        failure.write_text(json.dumps([error.found, error.rule, error.change]), "utf-8")
        shutil.rmtree(aside)
        raise
    except signals.StopRequested:
        stop.touch()
        shutil.rmtree(aside)
        raise
    seal(aside)
    aside.rename(target)
    stop.unlink(missing_ok=True)


def _stop_check(stop: Path) -> StopCheck:
    """Raises when it is time to stop; looks no more often than every `POLL_S`."""
    looked = time.monotonic()

    def check() -> None:
        nonlocal looked
        now = time.monotonic()
        if now - looked < POLL_S:
            return
        looked = now
        if signals.pending() or stop.exists():
            raise signals.StopRequested

    return check
