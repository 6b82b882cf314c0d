"""Which process compiles an op, and the stale lock of a process that was killed while it compiled.

Two locks are involved. Ours is a `FileLock` on one file in the extensions folder: the kernel frees it when its holder
ends, so it is never stale. torch's is a file `lock` in each op's folder (`torch.utils.file_baton`): a process killed
while it compiles leaves it, and every later process waits for it silently and for ever.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from ds_trainer.errors import MachineError
from ds_trainer.files import replace_text
from ds_trainer.log import get_logger

_POLL_S = 0.2


@dataclass
class BuildLock:
    """The held right to compile in one extensions folder.

    Args:
        note: File that names the op being compiled, and by whom. It lies beside the lock file, which older versions of
            filelock empty whenever they open it.
        unfinished: The op that the last holder began and did not finish; "" if none.
    """

    note: Path
    unfinished: str

    def begin(self, op: str) -> None:
        """Notes that this process compiles `op`; the note remains if the process is killed."""
        replace_text(self.note, json.dumps({"op": op, "pid": os.getpid(), "host": socket.gethostname()}))

    def end(self) -> None:
        """Removes the note: the op is complete."""
        self.note.unlink(missing_ok=True)
        self.unfinished = ""


@contextmanager
def build_lock(folder: Path) -> Iterator[BuildLock]:
    """Holds the right to compile in `folder`; logs and waits while another process of ours has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(folder / "ds_trainer.lock"), folder / "compiling.json"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if builder := _read(note):
            get_logger().info("waiting for process %(pid)d on %(host)s, which compiles DeepSpeed's %(op)s", builder)
        lock.acquire(poll_interval=_POLL_S)
    try:
        yield BuildLock(note, _read(note).get("op", ""))
    finally:
        lock.release()


def clear_torch_lock(lock: Path, known_dead: bool, grace_s: float | None = None) -> None:
    """Waits for torch's lock file of one op while its holder lives; removes or reports one left by a dead process.

    Args:
        lock: The lock file, which need not exist.
        known_dead: Whether a process of ours is known to have left it.
        grace_s: Seconds after which a lock of unknown origin is removed; None: it is reported instead.

    Raises:
        MachineError: The lock is of unknown origin.
    """
    logged = False
    while lock.exists() and (holder := lock_holder(lock)) is not None:
        if not logged:
            get_logger().info("waiting for process %d, which holds %s", holder.pid, lock)
            logged = True
        time.sleep(_POLL_S)
    if not known_dead and grace_s is None and lock.exists():
        raise MachineError(
            f"{lock} exists, and no process on this machine holds it",
            "torch holds this file while it compiles an op; a process that was killed leaves it, "
            "and the next one would wait for ever",
            f"if nothing on another machine or in another container compiles there, delete it: rm {lock}",
        )
    deadline = time.monotonic() + (0.0 if known_dead or grace_s is None else grace_s)
    while lock.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if lock.exists():
        lock.unlink(missing_ok=True)
        get_logger().info("removed %s, left by a process that was killed", lock, extra={"all_ranks": True})


def lock_holder(lock: Path) -> psutil.Process | None:
    """The process on this machine that holds torch's lock, if one is visible.

    torch keeps the file open while it holds it; a ninja that outlived it still works in the op's folder.
    """
    path, folder = str(lock.resolve()), str(lock.parent.resolve())
    for process in psutil.process_iter():
        try:
            compiles = process.name() == "ninja" and process.cwd() == folder
            if compiles or any(opened.path == path for opened in process.open_files()):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


def stale_locks(folder: Path) -> list[Path]:
    """Lock files of torch below `folder` that no process on this machine holds."""
    return [lock for lock in sorted(folder.glob("*/lock")) if lock_holder(lock) is None]


def _read(note: Path) -> dict:
    try:
        return json.loads(note.read_text("utf-8"))
    except FileNotFoundError:
        return {}
