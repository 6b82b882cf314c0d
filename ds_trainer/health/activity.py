"""For how long this process has done nothing: no computing, no I/O, no wait for a disk, no busy child process.

It reads the kernel's counters and asks no thread: a thread that holds Python's lock in a long call cannot answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path

import psutil

_SAMPLES = 3
"""Computing and I/O are averaged over so many samples, and a thread has to wait for a disk in so many in a row: one
moment of a library's housekeeping, or of paging on a busy machine, does not count as activity."""
_OWN_LOAD = 0.03
"""Fraction of a core; gloo's threads, which poll, take 0.01 to 0.02 of a slow one in a rank that stands still."""
_CHILD_LOAD = 0.1
"""Fraction of a core; a tracker's child takes a hundredth, workers that read or compile take far more."""
_BYTES_PER_S = 16_384
"""An occasional log line stays far below."""
_LONGEST_TICK_S = 5.0
"""Two samples further apart mean that the machine was suspended or this thread could not run: nothing is known."""


class Activity:
    """Measures its process. One thread makes and calls it; the work of that thread does not count."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._task = f"/proc/self/task/{threading.get_native_id()}/io"
        self._children: dict[int, float] = {}
        self._samples_at_disk = 0
        self._active_at = time.monotonic()
        self._samples = deque([(self._active_at, _cpu_s(), self._moved_bytes())], maxlen=_SAMPLES)

    def idle_s(self) -> float:
        """Takes a sample, which is due about once a second; returns for how long the process has done nothing."""
        now, cpu_s, moved = time.monotonic(), _cpu_s(), self._moved_bytes()
        was_suspended = now - self._samples[-1][0] > _LONGEST_TICK_S
        since, cpu_before, moved_before = self._samples[0]
        self._samples_at_disk = self._samples_at_disk + 1 if _waits_for_disk(os.getpid()) else 0
        active = (
            was_suspended
            or cpu_s - cpu_before > _OWN_LOAD * (now - since)
            or moved is None
            or moved - (moved_before or 0) > _BYTES_PER_S * (now - since)
            or self._samples_at_disk >= _SAMPLES
            or self._has_busy_child(now - self._samples[-1][0])
        )
        self._samples.append((now, cpu_s, moved))
        if active:
            self._active_at = now
        return now - self._active_at

    def _moved_bytes(self) -> int | None:
        """Bytes that this process has read and written so far; None if the kernel does not count them."""
        try:
            return _read_and_written("/proc/self/io") - _read_and_written(self._task)
        except OSError:
            return None

    def _has_busy_child(self, elapsed_s: float) -> bool:
        """Whether a child computes or waits for a disk; called last, since it walks all processes of the machine."""
        before, self._children = self._children, {}
        busy = False
        for child in self._process.children(recursive=True):
            try:
                times = child.cpu_times()
                waits = _waits_for_disk(child.pid)
            except (psutil.Error, OSError):
                continue  # It has just ended.
            spent = times.user + times.system
            self._children[child.pid] = spent
            busy = busy or waits or spent - before.get(child.pid, spent) > _CHILD_LOAD * elapsed_s
        return busy


def _cpu_s() -> float:
    return time.process_time() - time.thread_time()


def _read_and_written(path: str) -> int:
    counts = dict(line.split(": ") for line in Path(path).read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def _waits_for_disk(pid: int) -> bool:
    """Whether a thread of the process is in uninterruptible sleep, as on a slow disk or network drive."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # The thread has just ended.
        if state == "D":
            return True
    return False
