"""Waits that are right: on a download, another run's lock, a tracker's server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def expected_wait() -> Iterator[None]:
    """Announces that this process may stand still inside the block: the watchdog does not take it for stuck."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def in_expected_wait() -> bool:
    """Whether this process is inside such a block."""
    return _depth > 0
