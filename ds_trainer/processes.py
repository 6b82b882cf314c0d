"""Whether another process of this machine still runs. Pure."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, its exit code read by its parent or not; another one with its number is not it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
