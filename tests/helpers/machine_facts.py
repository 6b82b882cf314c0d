"""Imported by the fork server: what DeepSpeed asks of the machine in every process, asked once for all ranks.

Each rank would otherwise start a dozen programs: cpuinfo several times wherever the optimizer is on the host, and
numactl twice a step under ZeRO-3. Together they take longer than most runs of these tests.
"""

from __future__ import annotations

import functools
from typing import Any

import cpuinfo
from deepspeed.utils import numa


def once(module: Any, name: str) -> None:
    """Replaces a function without arguments by its result of now."""
    setattr(module, name, functools.partial(lambda value: value, getattr(module, name)()))


once(cpuinfo, "get_cpu_info")
once(numa, "get_numa_cores")
