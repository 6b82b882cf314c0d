"""The tensors of a block whose sequence is sharded: which of them are a rank's shard, and how shards are joined.

Legend: tp ranks of the group, B samples, T positions, t positions on a rank (T / tp, rounded up), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.parallel.tensor.collectives import gather_sequence, scatter_sequence, sum_gradient
from ds_trainer.parallel.tensor.dropout import seeded


class Positions:
    """The positions that a block works on, and their tensors.

    A shard is recognised by its shape, (B, t, ...), or (B * t, ...) where the block's code has joined the two, unless
    it is a tensor that all ranks have, such as a mask.

    Args:
        hidden_BtH: The hidden states that the block is given.
        full: Tensors that it is given and all ranks have.
        length: T.
        group: The tensor-parallel group.
        seed: Of random masks, the same on all tensor-parallel ranks; None: there are none.

    Attributes:
        in_region: Whether a region runs, which works on all positions.
        exit_width: Outputs of a row layer in which the region that runs ends; None: it does not end in one.
    """

    def __init__(
        self,
        hidden_BtH: torch.Tensor,
        full: list[torch.Tensor],
        length: int,
        group: dist.ProcessGroup,
        seed: int | None,
    ) -> None:
        self.samples, self.own = hidden_BtH.shape[:2]
        self.length, self.group = length, group
        self.in_region = False
        self.exit_width: int | None = None
        self._device, self._seed, self._regions = hidden_BtH.device, seed, 0
        self._full = {id(x) for x in full}

    def is_shard(self, x: torch.Tensor) -> bool:
        """Whether a tensor is (B, t, ...) and of the block."""
        return x.dim() > 2 and x.shape[:2] == (self.samples, self.own) and id(x) not in self._full

    def is_flat_shard(self, x: torch.Tensor) -> bool:
        """Whether a tensor is (B * t, ...) and of the block."""
        return x.dim() > 1 and x.shape[0] == self.samples * self.own and id(x) not in self._full

    def is_full(self, x: torch.Tensor) -> bool:
        """Whether a tensor is (B, T, ...)."""
        return x.dim() > 2 and x.shape[:2] == (self.samples, self.length)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """All positions of a shard of either shape; another tensor as it is."""
        if self.is_shard(x):
            return gathered(x, self.length, self.group)
        if self.is_flat_shard(x):  # The order of the joined positions is another than the model's own.
            return gathered(x.unsqueeze(0), x.shape[0] * self.group.size(), self.group).squeeze(0)
        return x

    def scattered(self, x: torch.Tensor, flat: bool) -> torch.Tensor:
        """This rank's positions of a tensor of all; another tensor as it is.

        Args:
            x: A tensor.
            flat: Whether the region was given joined positions.
        """
        if isinstance(x, torch.nn.Parameter):  # The block's own code uses it on this rank's positions.
            return sum_gradient(x, self.group)
        if flat:
            length = self.samples * self.own * self.group.size()
            is_full = x.dim() > 1 and x.shape[0] == length
            return scatter_sequence(x.unsqueeze(0), self.group).squeeze(0) if is_full else x
        if self.is_full(x):
            return scatter_sequence(x, self.group)
        if x.dim() > 1 and x.shape[0] == self.samples * self.length:
            return scatter_sequence(x.unflatten(0, (self.samples, self.length)), self.group).flatten(0, 1)
        return x

    @contextmanager
    def region(self, exit_width: int | None) -> Iterator[None]:
        """Within the context a region runs, whose dropout masks are equal on all ranks but between sharded layers."""
        self._regions += 1
        self.in_region, self.exit_width = True, exit_width
        try:
            with self._seeded(self.group.size() + self._regions):
                yield
        finally:
            self.in_region, self.exit_width = False, None

    @contextmanager
    def block(self) -> Iterator[None]:
        """Within the context the block runs: its dropout masks are this rank's own."""
        with self._seeded(self.group.rank()):
            yield

    @contextmanager
    def _seeded(self, offset: int) -> Iterator[None]:
        if self._seed is None:
            yield
        else:
            with seeded(self._seed + offset, self._device):
                yield


def gathered(x_BtH: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All positions; `sequence_shard` of the result is this rank's, where column layers send their gradient directly.

    Comm: as `gather_sequence`.
    """
    full: Any = gather_sequence(x_BtH, length, group).contiguous()  # As the model's code may expect it to be.
    full.sequence_shard = x_BtH
    return full


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, and in tuples, lists and dicts in it."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    return found


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The value with each tensor in it, and in tuples, lists and dicts in it, replaced by the function's result."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(each, function) for each in value)
    if type(value) is dict:
        return {name: mapped(each, function) for name, each in value.items()}
    return value
