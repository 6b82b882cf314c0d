"""Builds a folder in one process while the others wait: on a lock file, since a collective could time out.

Beside the folder `data` are `data.lock`, which the builder holds; `data.part`, which it fills; and two messages to the
waiting processes: `data.error`, why the build failed, and `data.stop`, that a signal asked one process to stop. The
folder lists the sizes of its files, so that one that has lost data since is found and rebuilt.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ds_trainer.errors import DataError
from ds_trainer.files import size_fault, sync
from ds_trainer.launch import signals
from ds_trainer.log import get_logger

POLL_S = 0.2
QUIET_WAIT_S = 10.0
"""A process that waits longer than this says so."""
SIZES = "sizes.json"

StopCheck = Callable[[], None]


def build_once(target: Path, build: Callable[[Path, StopCheck], None]) -> None:
    """Makes `target` exist, built by whichever of many processes comes first.

    The builder holds a lock that the kernel frees when its process ends, so a killed builder is replaced at once and a
    slow one can take any time. It fills a temporary folder, which is renamed when complete: `target` is complete or
    absent. A folder that has lost files, or parts of them, is rebuilt.

    Args:
        target: Folder to make.
        build: Fills the empty folder it is given. It calls its second argument every now and then, which raises
            `StopRequested` when a signal has asked a process that builds or waits to stop.

    Raises:
        DataError: `build` raised it, in this process or in the one waited for; the text is the same.
        StopRequested: A signal has asked this process to stop, or one that it waits for or that waits for it.
    """
    if _is_complete(target):
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
        if _is_complete(target):
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


def _wait(lock: FileLock, target: Path, stop: Path) -> None:
    """Waits for the builder and passes a stop on to it; prints only a long wait, as the builder shows its own bar."""
    says_so_at: float | None = time.monotonic() + QUIET_WAIT_S
    while True:
        try:
            lock.acquire(timeout=POLL_S, poll_interval=POLL_S)
            return
        except Timeout:
            if signals.pending():
                stop.touch()  # The builder may finish before it looks, and then all processes go on: so keep waiting.
        if says_so_at is not None and time.monotonic() > says_so_at:
            get_logger().info("waiting for another process to make %s", target)
            says_so_at = None


def _build(target: Path, build: Callable[[Path, StopCheck], None], failure: Path, stop: Path) -> None:
    if target.is_dir():
        get_logger().warning("warning: %s; it is rebuilt", _damage(target))
        shutil.rmtree(target)
    partial = target.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)  # left by a builder that was killed
    partial.mkdir()
    try:
        build(partial, _stop_check(stop))
    except DataError as error:
        failure.write_text(json.dumps([error.found, error.rule, error.change]), "utf-8")
        shutil.rmtree(partial)
        raise
    except signals.StopRequested:
        stop.touch()
        shutil.rmtree(partial)
        raise
    _write_sizes(partial)
    partial.rename(target)
    stop.unlink(missing_ok=True)


def _stop_check(stop: Path) -> StopCheck:
    """Raises when a process has been asked to stop; looks at most once every `POLL_S`."""
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


def _write_sizes(folder: Path) -> None:
    """Waits until the files of a folder are on the disk, and lists their sizes."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        sizes[path.name] = path.stat().st_size
    (folder / SIZES).write_text(json.dumps(sizes), "utf-8")


def _is_complete(target: Path) -> bool:
    return target.is_dir() and _damage(target) is None


def _damage(folder: Path) -> str | None:
    """How the files of a folder differ from the sizes that it lists; None: not at all."""
    try:
        sizes = json.loads((folder / SIZES).read_text("utf-8"))
    except (FileNotFoundError, ValueError) as error:
        return f"{folder / SIZES} cannot be read ({error})"
    for name, size in sizes.items():
        if fault := size_fault(folder / name, size):
            return fault
    return None
