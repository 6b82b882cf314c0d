"""How much host memory a process can still take: what is free on the machine, and what its control group allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


def available_bytes() -> tuple[int, str]:
    """Bytes that can still be taken without swapping, and what sets the bound, as text."""
    free = psutil.virtual_memory().available
    group = cgroup_available_bytes()
    if group is not None and group < free:
        return group, "the limit of this process's control group"
    return free, "what the machine has free"


def cgroup_available_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes left below the memory limits of this process's control group and its parents; None: no limit.

    Args:
        root: Where the control groups are mounted.
        membership: The file that names this process's groups.
    """
    if not membership.exists():
        return None
    left: list[int] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += _left(root, path, limit="memory.max", usage="memory.current", cache="inactive_file")
        elif "memory" in controllers.split(","):
            names = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "cache": "total_inactive_file"}
            left += _left(root / "memory", path, **names)
    return min(left, default=None)


def _left(root: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Limit less usage of each group up to the root; file cache is given back on demand and does not count."""
    inside = Path(path.lstrip("/"))
    for group in (root / inside, *(root / parent for parent in inside.parents)):
        if not (group / limit).exists() or not (group / usage).exists():
            continue
        most = (group / limit).read_text().strip()
        if most == "max" or int(most) > _UNLIMITED:
            continue
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield int(most) - int((group / usage).read_text()) + int(statistics.get(cache, 0))
