"""The slices of parameters, masters and optimizer states that a rank owns under ZeRO, read and written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_trainer.engines.deepspeed.internals import (
    flat_partition,
    flat_sub_group,
    fragment,
    in_flat_group,
    is_partitioned,
    read_shard,
    write_shard,
)
from ds_trainer.engines.deepspeed.zero3_load import partition_bounds
from ds_trainer.engines.state_handles import MASTER, StateTensor, entry, live
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit


def owned_slices(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], stage: int, split: ModelSplit
) -> dict[str, ParameterSlice]:
    """This rank's slice of each parameter that is trained; none where it owns nothing of it.

    Stage 3 shards every tensor by flat ranges, stages 1 and 2 shard the concatenation of each parameter group.

    Args:
        model: The model that DeepSpeed has wrapped.
        shapes: Shapes by name before DeepSpeed has sharded.
        stage: ZeRO stage.
        split: Which slices of the full parameters they are.
    """
    owned = {}
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and split.owns(name)):
            continue
        if stage == 3:
            start, stop = partition_bounds(parameter)
        elif in_flat_group(parameter):
            mapping = fragment(parameter)
            if mapping is None:
                continue
            address = mapping.lp_fragment_address
            start, stop = address.start, address.start + address.numel
        else:
            start, stop = 0, parameter.numel()
        if stop > start:
            owned[name] = split.slice(name, shapes[name], (start, stop))
    return owned


def state_handles(engine: deepspeed.DeepSpeedEngine, parameter: Any, numel: int) -> dict[str, StateTensor]:
    """Handles on this rank's slice of a parameter's fp32 master and optimizer states.

    What is on NVMe goes through DeepSpeed's swapper; counts, which it does not swap, are in memory.

    Args:
        engine: DeepSpeed's engine.
        parameter: A trainable parameter.
        numel: Elements that this rank owns, without padding.
    """
    states = engine.basic_optimizer.state
    if is_partitioned(parameter):
        optimizer = engine.optimizer
        values = states.get(flat_sub_group(optimizer, parameter), {})
        sharded = [key for key, value in values.items() if torch.is_tensor(value) and value.dim()]
        handles = {MASTER: _swapped(optimizer, parameter, None, numel)}
        handles |= {key: _swapped(optimizer, parameter, key, numel) for key in sharded}
    elif in_flat_group(parameter):
        mapping = fragment(parameter)
        values = states.get(flat_partition(engine.optimizer, mapping.param_group_index), {})
        sharded = mapping.get_optim_state_keys() if values else []
        handles = {MASTER: live(mapping.get_hp_fragment(), numel)}
        handles |= {key: live(mapping.get_hp_fragment(key), numel) for key in sharded}
    else:
        values, sharded = states.get(parameter, {}), []
        handles = {MASTER: live(parameter, numel)}
    return handles | {key: entry(values, key, numel) for key in values if key not in sharded}


def _swapped(optimizer: Any, parameter: Any, key: str | None, numel: int) -> StateTensor:
    """A handle that goes through stage 3's sub-groups, which are swapped in where they are not in memory."""

    def read() -> torch.Tensor:
        return read_shard(optimizer, parameter, key)[:numel].clone()

    def write(value: torch.Tensor) -> None:
        write_shard(optimizer, parameter, key, value)

    return StateTensor((numel,), torch.float32, read, write)


def catch_up_cpu_adam(optimizer: Any) -> None:
    """Brings the bias corrections of DeepSpeed's CPU Adam to the step count in its state.

    It multiplies its running powers of the betas once per step in fp32, but computes a power after a jump: the last bit
    of every weight would differ from a run that was never interrupted. So it steps through all of them on a tensor of
    one element.
    """
    steps = max((state["step"] for state in optimizer.state.values()), default=0)
    one = [torch.zeros(1) for _ in range(4)]
    group = optimizer.param_groups[0]
    settings = (*group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *settings, *one)


def load_wide_masters(
    engine: deepspeed.DeepSpeedEngine,
    named: list[tuple[str, Any]],
    slices: Mapping[str, ParameterSlice],
    weights: WeightSource,
) -> None:
    """Gives fp32 masters the checkpoint's values where its dtype is wider than that of the parameters.

    DeepSpeed makes masters from the parameters: from an fp32 checkpoint in a bf16 run it would keep 8 bits of 24.

    Args:
        engine: DeepSpeed's engine.
        named: Trainable parameters by their names in the model.
        slices: What this rank owns of them.
        weights: Where the values are read from.
    """
    for name, parameter in named:
        if name not in slices or weights.stored_dtype(name).itemsize <= parameter.dtype.itemsize:
            continue
        value = weights.read(name, torch.float32, slices[name].flat)
        if is_partitioned(parameter):
            write_shard(engine.optimizer, parameter, None, value)
        else:
            fragment(parameter).get_hp_fragment().data.copy_(value)
