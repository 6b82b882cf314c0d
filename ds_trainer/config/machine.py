"""The properties of the machine that a config's derived values depend on, without torch. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ds_trainer.config.resolved import Machine

_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Names under which Linux lists bf16 arithmetic: x86 with AVX-512, x86 with AMX, Arm."""


def probe_machine_pure(world: int = 1, device: Literal["cpu", "cuda"] | None = None) -> Machine:
    """Describes this machine from the files that the kernel offers.

    Args:
        world: Number of ranks.
        device: Kind of device; None: cuda where the NVIDIA driver is loaded.
    """
    if device is None:
        device = "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    if device == "cuda":
        reason = "assumed: GPUs since Ampere compute in bf16"
        return Machine(world, "cuda", ("fp32", "bf16", "fp16"), reason, node_ranks=_num_gpus())
    return cpu_machine(world, _cpu_flags())


def cpu_machine(world: int, flags: frozenset[str]) -> Machine:
    """A CPU with these feature flags."""
    found = [flag for flag in _BF16_FLAGS if flag in flags]
    if found:
        return Machine(world, "cpu", ("fp32", "bf16"), f"this CPU computes in bf16 ({', '.join(found)})")
    return Machine(world, "cpu", ("fp32",), "this CPU has no bf16 arithmetic and emulates it slowly")


def _num_gpus() -> int | None:
    """GPUs of this machine; None where it has none: the run is for another one."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or None


def _cpu_flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    lines = path.read_text().splitlines()
    return frozenset(flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()[2:])
