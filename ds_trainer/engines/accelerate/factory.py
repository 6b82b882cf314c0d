"""The `accelerate` engine: the same run through `Accelerator.prepare`, with plugins made from the run's JSON.

Each backend is the engine of that name, except that accelerate wraps the model: state, checkpoints and exports are the
same. Loss, accumulation, clipping and what happens to a gradient that is not finite stay ds_trainer's.
"""

from __future__ import annotations

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine


def make_accelerate_engine(resolved: ResolvedConfig, mesh: Mesh) -> Engine:
    """The engine of `accelerate.backend`; only that one's libraries are imported.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """
    match resolved.config.accelerate.backend:
        case "deepspeed":
            from ds_trainer.engines.accelerate.deepspeed import AccelerateDeepSpeedEngine

            return AccelerateDeepSpeedEngine(resolved, mesh)
        case "fsdp2":
            from ds_trainer.engines.accelerate.fsdp2 import AccelerateFSDP2Engine

            return AccelerateFSDP2Engine(resolved, mesh)
        case "ddp":
            from ds_trainer.engines.accelerate.ddp import AccelerateDDPEngine

            return AccelerateDDPEngine(resolved, mesh)
