"""The `Accelerator` of a run: configured by the run's JSON alone, and checked against it.

accelerate keeps one state per process, and reads the launcher's variables for whatever it is not given. On CPU it
misjudges its world: with a DeepSpeed plugin it takes each rank for the only one, with `cpu=True` it ignores FSDP and
DeepSpeed plugins. So what `prepare` returned is checked, and ds_trainer's own loader and rank helpers are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import EngineError

_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
_KEPT = ("ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "ACCELERATE_LOG_LEVEL")
"""Variables that do not concern training."""


def make_accelerator(mesh: Mesh, **options: Any) -> Accelerator:
    """An `Accelerator` on the process group and the device of this run; called within `configured_by_json`.

    Args:
        mesh: Process groups and device.
        options: Its arguments.

    Raises:
        EngineError: It computes on another device.
    """
    # It takes no second plugin, nor another dtype, and would use a state that TrainingArguments left behind.
    # transformers empties it in the same way for each TrainingArguments. Earlier Accelerators then show the new state.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(**options)
    if accelerator.device != mesh.device:
        raise EngineError(
            f"accelerate {version('accelerate')} computes on {accelerator.device}, this rank on {mesh.device}",
            "what was asked for must be what runs",
            "set run.device to the device that accelerate takes, or parallel.engine to another engine",
        )
    return accelerator


@contextmanager
def configured_by_json(mesh: Mesh) -> Iterator[None]:
    """Hides what `accelerate launch` has exported, and exports this rank's position as accelerate reads it.

    A conflict between the two has been refused before. Afterwards the variables are as they were: `Accelerator` sets
    some, which the next run in this process would take for a launcher's.
    """
    position = {
        "RANK": mesh.grid.rank,
        "WORLD_SIZE": mesh.grid.world,
        "LOCAL_RANK": mesh.grid.local_rank,
        "LOCAL_WORLD_SIZE": mesh.grid.local_world,
        # Required and not used: the process group exists.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
        # Where it is unset, accelerate changes the number of threads.
        "OMP_NUM_THREADS": torch.get_num_threads(),
        "ACCELERATE_TORCH_DEVICE": mesh.device,
    }

    def concerned() -> dict[str, str]:
        return {n: v for n, v in os.environ.items() if n in position or (n.startswith(_PREFIXES) and n not in _KEPT)}

    before = concerned()
    _exchange(before, {name: str(item) for name, item in position.items()})
    try:
        yield
    finally:
        _exchange(concerned(), before)


def _exchange(old: dict[str, str], new: dict[str, str]) -> None:
    for name in old.keys() - new.keys():
        del os.environ[name]
    os.environ.update(new)


def check_prepared(module: Any, wanted: type, accelerator: Accelerator, resolved: ResolvedConfig) -> None:
    """Checks that `prepare` returned what runs the step of the backend.

    Raises:
        EngineError: It returned something else, such as the bare model, which every rank would train by itself.
    """
    if not isinstance(module, wanted):
        raise EngineError(
            f"accelerate {version('accelerate')} prepared a {type(module).__name__}, and takes this rank for "
            f"{accelerator.process_index} of {accelerator.num_processes} in a {accelerator.distributed_type} run",
            f"accelerate.backend {resolved.config.accelerate.backend} runs through {wanted.__name__}",
            f"set parallel.engine to {resolved.config.accelerate.backend}, which does not ask accelerate",
        )
