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
MODEL = "model"
_LOCK = ".in_use"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds the folder for this process; the kernel frees it when the process ends, however it ends.

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
    """Keeps an earlier run's metrics under the next free number, and says what this run will replace."""
    metrics = folder / METRICS
    if metrics.exists():
        kept = next(p for n in count(1) if not (p := metrics.with_name(f"metrics.{n}.jsonl")).exists())
        metrics.rename(kept)
        get_logger().info("%s held an earlier run: its metrics are now %s", folder, kept.name)
    if (folder / MODEL).exists():
        get_logger().info("%s is an earlier run's until this one has ended", folder / MODEL)
