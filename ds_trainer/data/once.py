"""One process builds a folder, the others wait: on a lock file, never on a collective that could time out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ds_trainer.errors import DataError
from ds_trainer.log import get_logger

POLL_S = 0.2
PATIENCE_S = 10.0


def build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Makes `target` exist, whichever of many processes gets to it first.

    The builder holds a lock that the kernel frees when its process ends, so a killed builder is replaced at once and a
    slow one can take any time. It writes to a folder aside, renamed when complete: `target` is whole or absent.

    Args:
        target: Folder to make.
        build: Fills the empty folder it is given.

    Raises:
        DataError: `build` raised it, in this process or in the one waited for; the text is the same.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_suffix(".lock"))
    failure = target.with_suffix(".error")
    waited = False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waited = True
        _wait(lock, target)
    try:
        if target.is_dir():
            return
        if waited and failure.exists():
            raise DataError(*json.loads(failure.read_text("utf-8")))
        failure.unlink(missing_ok=True)
        _build(target, build, failure)
    finally:
        lock.release()


def _wait(lock: FileLock, target: Path) -> None:
    """Waits for the builder, and says so only when it is slow: its own bar is on the same terminal."""
    try:
        lock.acquire(timeout=PATIENCE_S, poll_interval=POLL_S)
    except Timeout:
        get_logger().info("waiting for another process to make %s", target)
        lock.acquire(poll_interval=POLL_S)


def _build(target: Path, build: Callable[[Path], None], failure: Path) -> None:
    aside = target.with_suffix(".part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a builder that was killed
    aside.mkdir()
    try:
        build(aside)
    except DataError as error:
        failure.write_text(json.dumps([error.found, error.rule, error.change]), "utf-8")
        shutil.rmtree(aside)
        raise
    aside.rename(target)
