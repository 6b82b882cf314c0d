"""What exists after set-up, measured on DeepSpeed's engine, its optimizer's flat buffers and the swap files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch.distributed as dist

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import EngineFacts
from ds_trainer.engines.deepspeed.internals import states_on_nvme, updated_tensors
from ds_trainer.engines.introspect import (
    DTYPE_NAMES,
    devices,
    measured_pp_size,
    measured_tp_size,
    state_tensors,
    stateless_bytes,
    storage_bytes,
)
from ds_trainer.parallel.model_split import ModelSplit


def measure(
    engine: deepspeed.DeepSpeedEngine,
    parameters: Mapping[str, Any],
    split: ModelSplit,
    mesh: Mesh,
    nvme_bytes: int,
) -> EngineFacts:
    """The facts of a run on DeepSpeed.

    Args:
        engine: DeepSpeed's engine.
        parameters: The model's, by name.
        split: Which of them this rank owns.
        mesh: Process groups.
        nvme_bytes: Bytes in this rank's swap files.
    """
    stage, masters = engine.zero_optimization_stage(), updated_tensors(engine)
    shards: list[Any] = list(parameters.values())
    if stage == 3:
        shards = [p.ds_tensor for name, p in parameters.items() if split.owns(name)]
    on_nvme = any(getattr(shard, "final_location", None) == "nvme" for shard in shards)
    optimizer_tensors = state_tensors(engine.basic_optimizer)
    if engine.optimizer is not engine.basic_optimizer:
        optimizer_tensors += masters
    autocast = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None
    tp_size = engine.mp_world_size // mesh.grid.pp_size
    return EngineFacts(
        engine=type(engine).__name__,
        optimizer=type(engine.basic_optimizer).__name__,
        stage=stage,
        group_size=dist.get_world_size(engine.data_parallel_group),
        param_device="nvme" if on_nvme else devices(shards),
        optimizer_device="nvme" if states_on_nvme(engine.optimizer) else devices(masters),
        param_bytes=storage_bytes(shards),
        optimizer_bytes=storage_bytes(optimizer_tensors),
        nvme_bytes=nvme_bytes,
        compute_dtype=DTYPE_NAMES[autocast or next(iter(parameters.values())).dtype],
        settings={
            "parallel.tp": min(tp_size, measured_tp_size(split, parameters.items())),
            "parallel.pp": measured_pp_size(split, parameters),
        },
        stateless_bytes=stateless_bytes(engine.basic_optimizer, masters),
    )
