"""The part of parameters, masters and optimizer states that a rank owns under ZeRO, read and written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_trainer.engines.zero3_load import partition_bounds
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.source import WeightSource


def owned_slices(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], stage: int) -> dict[str, ParameterSlice]:
    """This rank's slice of each parameter that is trained; none where it owns nothing of it.

    Stage 3 cuts every tensor into flat shards, stages 1 and 2 cut the concatenation of each parameter group.

    Args:
        model: The model that DeepSpeed has wrapped.
        shapes: Full shapes by name.
        stage: ZeRO stage.
    """
    owned = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if stage == 3:
            start, stop = partition_bounds(parameter)
        elif hasattr(parameter, "_hp_mapping"):
            if parameter._hp_mapping is None:
                continue
            address = parameter._hp_mapping.lp_fragment_address
            start, stop = address.start, address.start + address.numel
        else:
            start, stop = 0, parameter.numel()
        if stop > start:
            owned[name] = ParameterSlice.flat_range(name, shapes[name], start, stop)
    return owned


def read_state(engine: deepspeed.DeepSpeedEngine, parameter: Any, numel: int) -> dict[str, torch.Tensor]:
    """This rank's part of a parameter's fp32 master and optimizer states, from NVMe where they lie there.

    Args:
        engine: DeepSpeed's engine.
        parameter: A trainable parameter.
        numel: Elements that this rank owns, padding left out.
    """
    states = engine.basic_optimizer.state
    keys = sorted({k for state in states.values() for k, v in state.items() if torch.is_tensor(v) and v.dim()})
    if hasattr(parameter, "ds_id"):
        optimizer = engine.optimizer
        read = {"master": optimizer.get_local_fp32_param(parameter)}
        read |= {key: optimizer.get_local_fp32_param(parameter, key) for key in keys}
        return {key: value.flatten()[:numel].clone() for key, value in read.items()}
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        return {"master": mapping.get_hp_fragment()} | {key: mapping.get_hp_fragment(key) for key in keys}
    return {"master": parameter.detach()} | {k: v for k, v in states.get(parameter, {}).items() if k in keys}


def load_wide_masters(
    engine: deepspeed.DeepSpeedEngine, named: list[tuple[str, Any]], stage: int, weights: WeightSource
) -> None:
    """Gives fp32 masters the checkpoint's own precision where it is wider than the format of the parameters.

    DeepSpeed makes masters from the parameters: from an fp32 checkpoint in a bf16 run it would keep 8 bits of 24.

    Args:
        engine: DeepSpeed's engine.
        named: Trainable parameters under their model names.
        stage: ZeRO stage, 1 to 3.
        weights: Where the values are read from.
    """
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named}
    slices = owned_slices(engine.module, shapes, stage)
    for name, parameter in named:
        if name not in slices or weights.stored_dtype(name).itemsize <= parameter.dtype.itemsize:
            continue
        value = weights.read(name, torch.float32, slices[name].flat)
        if stage == 3:
            padding = parameter.ds_tensor.ds_numel - value.numel()
            engine.optimizer.set_local_hp_param(nn.functional.pad(value, (0, padding)), parameter)
        else:
            parameter._hp_mapping.get_hp_fragment().data.copy_(value)
