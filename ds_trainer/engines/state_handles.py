"""Handles on the tensors of a parameter's state: masters, moments and counts, read and written where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_trainer.engines.introspect import local_shard
from ds_trainer.errors import EngineError

MASTER = "master"
"""Key of the fp32 parameter itself, beside the optimizer's own keys."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a parameter's state on this rank. It is read and written through functions: it may be on NVMe.

    Args:
        shape: `(n,)` for the n elements of the owned slice, flattened; `()` for a count; any other shape, such as that
            of Adafactor's factors, where the full parameter is owned.
        dtype: Dtype of the value.
        read: Returns the value; what it returns may be the live tensor.
        write: Overwrites the value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


State = Mapping[str, Mapping[str, StateTensor]]
"""Parameter name -> key -> handle."""


def live(tensor: torch.Tensor, numel: int) -> StateTensor:
    """The handle of a tensor in memory.

    Args:
        tensor: The live tensor; of a DTensor, this rank's shard.
        numel: Elements of the owned slice; a tensor of as many is returned flat.
    """
    tensor = local_shard(tensor)
    shape = (numel,) if tensor.dim() and tensor.numel() == numel else tuple(tensor.shape)

    def read() -> torch.Tensor:
        # One count of a flat group serves all its parameters, and a file holds no tensor twice.
        return tensor.detach().reshape(shape) if shape else tensor.detach().clone()

    def write(value: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(value.view(tensor.shape))

    return StateTensor(shape, tensor.dtype, read, write)


def entry(values: MutableMapping[str, Any], key: str, numel: int) -> StateTensor:
    """The handle of one entry of an optimizer's state, a tensor or a Python number.

    Raises:
        EngineError: It is neither.
    """
    value = values[key]
    if torch.is_tensor(value):
        return live(value, numel)
    if not isinstance(value, int | float):
        raise EngineError(
            f"the optimizer keeps {key!r} as {type(value).__name__}",
            "a checkpoint holds tensors and numbers, and nothing pickled",
            "use an optimizer whose state is tensors and numbers",
        )
    kind = type(value)
    dtype = torch.int64 if kind in (int, bool) else torch.float64

    def write(new: torch.Tensor) -> None:
        values[key] = kind(new.item())

    return StateTensor((), dtype, lambda: torch.tensor(values[key], dtype=dtype), write)
