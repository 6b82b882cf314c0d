"""Attributes of DeepSpeed 0.19 that its documentation does not promise; no other module reads its private ones.

A test lists all that a new version of DeepSpeed no longer has.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime import config as runtime_config

from ds_trainer.engines.introspect import grouped_parameters

REMOVED_KEYS = runtime_config._REMOVED_TOP_LEVEL_CONFIG_KEYS
"""Sections that earlier versions read, and that this one refuses."""


class Partitioner(deepspeed.zero.Init):
    """DeepSpeed's partitioning without the broadcast of full tensors from rank 0."""

    def partition(self, parameter: torch.Tensor) -> None:
        """Replaces a parameter's value by this rank's flat shard of it, as stage 3 holds it."""
        self._convert_to_zero_parameters([parameter])

    def _zero_init_param(self, param: Any) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()


def is_partitioned(parameter: Any) -> bool:
    """Whether stage 3 holds a parameter as a flat shard."""
    return hasattr(parameter, "ds_id")


def in_flat_group(parameter: Any) -> bool:
    """Whether a parameter lies in its group's flat buffer, whose partitions stages 1 and 2 update."""
    return hasattr(parameter, "_hp_mapping")


def fragment(parameter: Any) -> Any:
    """DeepSpeed's record of which fragment of such a parameter lies in this rank's partition; None: no element."""
    return parameter._hp_mapping


def flat_partition(optimizer: Any, index: int) -> torch.Tensor:
    """This rank's fp32 partition of a parameter group, which the optimizer updates (stages 1 and 2)."""
    name = "fp32_groups_flat_partition"  # of BF16_Optimizer
    return getattr(optimizer, name if hasattr(optimizer, name) else "single_partition_of_fp32_groups")[index]


def flat_sub_group(optimizer: Any, parameter: Any) -> torch.Tensor:
    """The flat fp32 shards of the sub-group that a parameter is in, which the optimizer updates (stage 3)."""
    return optimizer.fp32_partitioned_groups_flat[optimizer.grad_position[optimizer.get_param_id(parameter)][0]]


def updated_tensors(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """What the optimizer updates; at stage 3 its groups hold one sub-group at a time."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return grouped_parameters(engine.basic_optimizer)


def link_states(optimizer: Any) -> None:
    """Lets fragments find their optimizer states (stages 1 and 2).

    DeepSpeed looks states up once, after its first group's first step, when its other groups have none yet.
    """
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def read_shard(optimizer: Any, parameter: Any, key: str | None) -> torch.Tensor:
    """This rank's shard of a master (no key) or an optimizer state at stage 3, padded; swapped in where it is on NVMe.

    The buffer that it lies in is filled anew by the next read.
    """
    return optimizer.get_local_fp32_param(parameter, key).detach().flatten()


def write_shard(optimizer: Any, parameter: Any, key: str | None, value: torch.Tensor) -> None:
    """Overwrites this rank's shard of a master (no key) or an optimizer state at stage 3; its padding becomes 0.

    What DeepSpeed's `set_local_hp_param` does, which fails for parameters that lie on NVMe: it compares the value's
    shape with that of a tensor that is empty then.
    """
    partition, group = optimizer._get_fp32_opt_state_partition(
        parameter, release_swap_buffers=False, optim_state_key=key
    )
    partition.data.copy_(torch.nn.functional.pad(value.flatten(), (0, partition.numel() - value.numel())))
    if optimizer._swappable_optimizer_subgroup(group):
        optimizer._optimizer_states_and_gradient_swap_out(group)


def states_on_nvme(optimizer: Any) -> bool:
    """Whether any sub-group of stage 3 is large enough to go to NVMe."""
    if not getattr(optimizer, "swap_optimizer", False):
        return False
    return any(optimizer._swappable_optimizer_subgroup(i) for i in range(len(optimizer.fp16_groups)))


def accumulated_gradient(optimizer: Any, parameter: Any) -> torch.Tensor | None:
    """The sum of a parameter's gradients, not yet reduced, as the optimizer keeps it."""
    if hasattr(optimizer, "get_gradient_for_reduction"):
        return optimizer.get_gradient_for_reduction(parameter)
    return getattr(parameter, "_hp_grad", parameter.grad)  # BF16_Optimizer; stage 0


def full_gradient(parameter: Any) -> torch.Tensor | None:
    """A parameter's reduced gradient in full, on every data-parallel rank; None where it has none.

    Comm: one all-gather (stage 3) or all-reduce (stages 1, 2) over the data-parallel ranks.
    """
    if in_flat_group(parameter):
        return parameter.get_full_hp_grad()
    return deepspeed.utils.safe_get_full_grad(parameter)
