"""The part of parameters, masters and optimizer states that a rank owns under ZeRO, read and written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_trainer.engines.deepspeed.zero3_load import partition_bounds
from ds_trainer.engines.state_handles import MASTER, StateTensor, entry, live
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit


def owned_slices(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], stage: int, split: ModelSplit
) -> dict[str, ParameterSlice]:
    """This rank's slice of each parameter that is trained; none where it owns nothing of it.

    Stage 3 cuts every tensor into flat shards, stages 1 and 2 cut the concatenation of each parameter group.

    Args:
        model: The model that DeepSpeed has wrapped.
        shapes: Shapes before DeepSpeed's cut by name.
        stage: ZeRO stage.
        split: Which part of the full parameters they are.
    """
    owned = {}
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and split.owns(name)):
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
            owned[name] = split.slice(name, shapes[name], (start, stop))
    return owned


def state_handles(engine: deepspeed.DeepSpeedEngine, parameter: Any, numel: int) -> dict[str, StateTensor]:
    """Handles on this rank's part of a parameter's fp32 master and optimizer states.

    What lies on NVMe goes through DeepSpeed's swapper; counts, which the swapper leaves out, are in memory.

    Args:
        engine: DeepSpeed's engine.
        parameter: A trainable parameter.
        numel: Elements that this rank owns, padding left out.
    """
    states = engine.basic_optimizer.state
    if hasattr(parameter, "ds_id"):
        optimizer = engine.optimizer
        group = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
        values = states.get(optimizer.fp32_partitioned_groups_flat[group], {})
        cut = [key for key, value in values.items() if torch.is_tensor(value) and value.dim()]
        handles = {MASTER: _swapped(optimizer, parameter, None, numel)}
        handles |= {key: _swapped(optimizer, parameter, key, numel) for key in cut}
    elif hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        values = states.get(_flat_group(engine.optimizer, mapping.param_group_index), {})
        cut = mapping.get_optim_state_keys() if values else []
        handles = {MASTER: live(mapping.get_hp_fragment(), numel)}
        handles |= {key: live(mapping.get_hp_fragment(key), numel) for key in cut}
    else:
        values, cut = states.get(parameter, {}), []
        handles = {MASTER: live(parameter, numel)}
    return handles | {key: entry(values, key, numel) for key in values if key not in cut}


def _flat_group(optimizer: Any, index: int) -> torch.Tensor:
    """The flat fp32 partition of a parameter group, which the optimizer updates (stages 1 and 2)."""
    name = "fp32_groups_flat_partition"  # of BF16_Optimizer
    return getattr(optimizer, name if hasattr(optimizer, name) else "single_partition_of_fp32_groups")[index]


def _swapped(optimizer: Any, parameter: Any, key: str | None, numel: int) -> StateTensor:
    """A handle that goes through stage 3's sub-groups, which are swapped in where they are not in memory."""

    def read() -> torch.Tensor:
        # The buffer that it lies in is filled anew by the next read.
        return optimizer.get_local_fp32_param(parameter, key).detach().flatten()[:numel].clone()

    def write(value: torch.Tensor) -> None:
        _write_partition(optimizer, parameter, key, value)

    return StateTensor((numel,), torch.float32, read, write)


def _write_partition(optimizer: Any, parameter: Any, key: str | None, value: torch.Tensor) -> None:
    """Overwrites this rank's part of a master (no key) or an optimizer state at stage 3; its padding becomes 0.

    What DeepSpeed's `set_local_hp_param` does, which fails for parameters that lie on NVMe: it holds the value against
    a tensor that is empty then.
    """
    partition, group = optimizer._get_fp32_opt_state_partition(
        parameter, release_swap_buffers=False, optim_state_key=key
    )
    partition.data.copy_(nn.functional.pad(value.flatten(), (0, partition.numel() - value.numel())))
    if optimizer._swappable_optimizer_subgroup(group):
        optimizer._optimizer_states_and_gradient_swap_out(group)


def catch_up_cpu_adam(optimizer: Any) -> None:
    """Brings the bias corrections of DeepSpeed's CPU Adam to the step count in its state.

    It multiplies its running powers of the betas once per step in fp32, and takes a power of its own after a jump: the
    last bit of every weight would differ from a run that was never interrupted. So the steps are counted up one by one
    on a tensor of one element.
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
    """Gives fp32 masters the checkpoint's own precision where it is wider than the format of the parameters.

    DeepSpeed makes masters from the parameters: from an fp32 checkpoint in a bf16 run it would keep 8 bits of 24.

    Args:
        engine: DeepSpeed's engine.
        named: Trainable parameters under their model names.
        slices: What this rank owns of them.
        weights: Where the values are read from.
    """
    for name, parameter in named:
        if name not in slices or weights.stored_dtype(name).itemsize <= parameter.dtype.itemsize:
            continue
        value = weights.read(name, torch.float32, slices[name].flat)
        if hasattr(parameter, "ds_id"):
            _write_partition(engine.optimizer, parameter, None, value)
        else:
            parameter._hp_mapping.get_hp_fragment().data.copy_(value)
