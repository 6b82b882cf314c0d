"""How much memory of its own this process used at most while something ran."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def rss_anon_bytes() -> int:
    """Bytes of this process's anonymous memory: what it allocated, without pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak:
    """Filled in when the block ends: `bytes` above what was in use when it began."""

    bytes = 0


@contextmanager
def rss_anon_peak(interval_s: float = 0.002) -> Iterator[Peak]:
    """Samples anonymous memory from a thread while the block runs."""
    start, peak, done = rss_anon_bytes(), Peak(), threading.Event()

    def sample() -> None:
        while not done.wait(interval_s):
            peak.bytes = max(peak.bytes, rss_anon_bytes() - start)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        peak.bytes = max(peak.bytes, rss_anon_bytes() - start)
