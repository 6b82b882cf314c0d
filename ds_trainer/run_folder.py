"""The output folder: one run at a time writes to it, and an earlier run's metrics are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from ds_trainer.errors import MachineError
from ds_trainer.log import get_logger

METRICS = "metrics.jsonl"
GENERATIONS = "generations.jsonl"
MODEL = "model"
_LOCK = ".in_use"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Locks the folder for this process; the kernel frees the lock when the process ends, however it ends.

    Raises:
        MachineError: Another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise MachineError(
            f"another run is writing to {folder}",
            "two runs in one folder would overwrite each other's metrics and model",
            "set run.output_dir to another folder, or wait for that run",
        ) from None
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)
        lock.release()


def set_aside_earlier_run(folder: Path) -> None:
    """Renames an earlier run's metrics to the next free number, and logs what this run will replace."""
    files = [folder / name for name in (METRICS, GENERATIONS)]
    number = next(n for n in count(1) if not any(_numbered(file, n).exists() for file in files))
    for file in files:
        if file.exists():
            kept = file.rename(_numbered(file, number))
            get_logger().info("%s held an earlier run: its %s are now %s", folder, file.stem, kept.name)
    if (folder / MODEL).exists():
        get_logger().info("%s is an earlier run's until this one has ended", folder / MODEL)


def _numbered(file: Path, number: int) -> Path:
    return file.with_suffix(f".{number}{file.suffix}")
