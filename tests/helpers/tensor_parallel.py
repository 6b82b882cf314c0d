"""A model split over all ranks of the world, with the values of a whole one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.distributed.process_groups import Mesh, init_mesh
from ds_trainer.launch.environment import grid_from_environment
from ds_trainer.models.weight_source import ModuleWeights
from ds_trainer.parallel.model_split import LocalWeights, ModelSplit
from ds_trainer.parallel.tensor.parallelize import split_model


def tensor_mesh() -> Mesh:
    """A mesh whose only axis is the tensor group: all ranks of the world."""
    grid = grid_from_environment()
    return init_mesh(replace(grid, tp_size=grid.world), "cpu")


def split_copy(whole: nn.Module, **parallel: Any) -> tuple[Any, ModelSplit]:
    """This rank's part of a model, which stays as it is, and how it was split."""
    part = deepcopy(whole)
    split = split_model(part, ParallelConfig(tp=dist.get_world_size(), **parallel), tensor_mesh())
    weights = LocalWeights(ModuleWeights(deepcopy(whole)), split)
    for name, parameter in list(part.named_parameters()):
        if parameter.is_meta:
            _replace(part, parameter, nn.Parameter(weights.view(name).clone(), parameter.requires_grad))
    return part, split


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def from_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each rank."""
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor.detach().contiguous())
    return out
