"""What this machine has, compared with what a run can need."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from torch.utils.cpp_extension import CUDA_HOME

from ds_trainer.distributed.device import probe_machine
from ds_trainer.host.build_lock import stale_locks
from ds_trainer.host.deepspeed_ops import BUILDERS, extensions_dir, is_built
from ds_trainer.host.free_space import free_bytes
from ds_trainer.host.host_memory import available_bytes
from ds_trainer.host.toolchain import cxx, has_compiler, has_cuda_toolkit, has_libaio, has_ninja, has_python_headers

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Args:
        name: What was checked.
        value: What was found.
        ok: False when a run that needs it would fail.
        needed: False when only some runs need it.
        note: What follows from it, or how to fix it.
    """

    name: str
    value: str
    ok: bool = True
    needed: bool = True
    note: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether no run can work until this is fixed."""
        return self.needed and not self.ok


def run_checks() -> list[Check]:
    """Checks the software, the devices, the tools that compile DeepSpeed's ops, the ops, memory and disk."""
    return [*_software(), *_devices(), *_tools(), *_ops(), *_memory_and_disk()]


def _software() -> Iterator[Check]:
    yield Check("python", platform.python_version(), note=sys.prefix)
    for requirement in map(Requirement, requires("ds_trainer") or ()):
        if requirement.name in _PACKAGES:
            found = version(requirement.name)
            fits = requirement.specifier.contains(found, prereleases=True)
            yield Check(requirement.name, found, fits, note=f"wants {requirement.specifier}")


def _devices() -> Iterator[Check]:
    machine = probe_machine(world=1)
    yield Check("device", machine.device, note=f"{', '.join(machine.native_dtypes)}: {machine.reason}")
    yield Check("cores", str(len(os.sched_getaffinity(0))), note="that this process may use")


def _tools() -> Iterator[Check]:
    """The tools that only runs with offload need."""
    tools = [
        ("C++ compiler", has_compiler(), cxx(), "apt install g++"),
        ("ninja", has_ninja(), shutil.which("ninja"), "pip install ninja"),
        ("Python.h", has_python_headers(), "present", "apt install python3-dev"),
        ("libaio", has_libaio(), "present", "only nvme needs it: apt install libaio-dev"),
        ("CUDA toolkit", has_cuda_toolkit(), CUDA_HOME or "none, and no GPU", "only nvme needs it: set CUDA_HOME"),
    ]
    for name, present, found, remedy in tools:
        value, note = (found or "", "") if present else ("missing", f"for offload, {remedy}")
        yield Check(name, value, present, needed=False, note=note)


def _ops() -> Iterator[Check]:
    for op in BUILDERS:
        built = is_built(op)
        note = "" if built else f"compiled at first use, or now: ds-trainer doctor --build-ops --ops {op}"
        yield Check(f"op {op}", "built" if built else "not built", note=note)
    for lock in stale_locks(extensions_dir()):
        note = "left by a process that was killed; a run would wait for it"
        yield Check("stale lock", str(lock), ok=False, note=f"{note}: rm {lock}")


def _memory_and_disk() -> Iterator[Check]:
    free, bound = available_bytes()
    yield Check("host memory", f"{free / 1e9:.1f} GB free", note=bound)
    for name, folder in (("disk here", os.getcwd()), ("disk of the ops", sys.prefix)):
        yield Check(name, f"{free_bytes(Path(folder)) / 1e9:.1f} GB free", note=folder)
