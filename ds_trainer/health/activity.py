"""Since when this process has done nothing: no computing, no reading or writing, no waiting for a disk, no busy child.

What the kernel counts is asked, not what threads say: a thread that holds Python's lock in a long call can say nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path

import psutil

_LOOKS = 3
"""Over so many looks computing and moving of bytes are averaged, and in so many in a row a thread is to wait for a
disk: one moment of a library's housekeeping, or of a busy machine's paging, is no sign of life."""
_OWN_SHARE = 0.01
"""Of a core; a loop of `time.sleep(1)` takes a hundredth of that."""
_CHILD_SHARE = 0.1
"""Of a core; trackers keep a child that takes a hundredth, workers that read or compile take far more."""
_BYTES_PER_S = 16_384
"""A log line now and then stays far below."""
_LONGEST_TICK_S = 5.0
"""Two looks further apart mean that the machine was suspended, or this thread could not run: nothing is known."""


class Activity:
    """Measures its process; made and asked by one thread, whose own work does not count."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._task = f"/proc/self/task/{threading.get_native_id()}/io"
        self._children: dict[int, float] = {}
        self._looks_at_disk = 0
        self._active_at = time.monotonic()
        self._samples = deque([(self._active_at, _cpu_s(), self._moved_bytes())], maxlen=_LOOKS)

    def idle_s(self) -> float:
        """Looks again, which is to be done about once a second, and says for how long nothing has been done."""
        now, cpu_s, moved = time.monotonic(), _cpu_s(), self._moved_bytes()
        was_away = now - self._samples[-1][0] > _LONGEST_TICK_S
        since, cpu_before, moved_before = self._samples[0]
        self._looks_at_disk = self._looks_at_disk + 1 if _waits_for_disk(os.getpid()) else 0
        active = (
            was_away
            or cpu_s - cpu_before > _OWN_SHARE * (now - since)
            or moved is None
            or moved - (moved_before or 0) > _BYTES_PER_S * (now - since)
            or self._looks_at_disk >= _LOOKS
            or self._has_busy_child(now - self._samples[-1][0])
        )
        self._samples.append((now, cpu_s, moved))
        if active:
            self._active_at = now
        return now - self._active_at

    def _moved_bytes(self) -> int | None:
        """Bytes that this process has read and written so far; None where the kernel does not say."""
        try:
            return _read_and_written("/proc/self/io") - _read_and_written(self._task)
        except OSError:
            return None

    def _has_busy_child(self, passed: float) -> bool:
        """Asked of a process that is idle itself only, since it walks through all processes of the machine."""
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
            busy = busy or waits or spent - before.get(child.pid, spent) > _CHILD_SHARE * passed
        return busy


def _cpu_s() -> float:
    return time.process_time() - time.thread_time()


def _read_and_written(path: str) -> int:
    counts = dict(line.split(": ") for line in Path(path).read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def _waits_for_disk(pid: int) -> bool:
    """Whether a thread of the process is in uninterruptible sleep: a slow disk or network drive works for it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # The thread has just ended.
        if state == "D":
            return True
    return False
