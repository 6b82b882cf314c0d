"""Shards a model with FSDP2 and loads it: no rank ever holds, or reads, more than its own rows.

`fully_shard` takes full parameters on every rank, unless they are on meta. So the model is sharded on meta, and each
rank then makes its own rows and fills them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ds_trainer.errors import ConfigError
from ds_trainer.layout import even_flat_range
from ds_trainer.models.weight_source import WeightSource


def load_sharded(
    model: nn.Module, weights: WeightSource, shard: Callable[[], None], device: torch.device
) -> dict[str, nn.Parameter]:
    """Shards a model in place and fills this rank's rows of every parameter, in fp32.

    Args:
        model: A skeleton on meta, or an instance.
        weights: Where the values are read from.
        shard: Calls `fully_shard` on the model and its modules.
        device: Where the rows go.

    Returns:
        The sharded parameters by name, a tied one once.

    Shapes: a parameter of n rows becomes a shard of ceil(n / ranks) rows per rank; the last ones are short or empty.

    Raises:
        ConfigError: A parameter has no rows.
    """
    _to_meta(dict(model.named_parameters()))
    shard()
    sharded: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in sharded.items():
        own = nn.Parameter(_own_rows(name, parameter, weights, device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, own)  # The object stays, which FSDP2 and several modules may hold.
    return sharded


def _to_meta(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if not parameter.dim():
            raise ConfigError(
                f"{name} is a scalar",
                "FSDP2 shards parameters by rows, and a scalar has no row",
                "give it the shape (1,), or set parallel.engine to ddp or deepspeed",
            )
        dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
        torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def _own_rows(name: str, sharded: DTensor, weights: WeightSource, device: torch.device) -> DTensor:
    local = torch.empty(sharded.to_local().shape, dtype=sharded.dtype, device=device)
    if local.numel():
        local.view(-1).copy_(weights.view(name, shard_range(sharded)))
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def shard_range(sharded: DTensor) -> tuple[int, int]:
    """Start and stop of this rank's rows in the row-major flattened parameter."""
    row = prod(sharded.shape[1:])
    first, last = _rows(sharded)
    return first * row, last * row


def first_row(sharded: DTensor) -> int:
    """Number of this rank's first row in the parameter."""
    return _rows(sharded)[0]


def _rows(sharded: DTensor) -> tuple[int, int]:
    mesh = sharded.device_mesh
    return even_flat_range(sharded.shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
