"""Shards that several tensor-parallel ranks hold, such as KV heads that are fewer than the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.collectives import start_all_reduce


@dataclass(frozen=True)
class ReplicatedShards:
    """Where a rank's replicated shards lie: each holder computes one term of the gradient, and all must take the sum.

    Example:
        2 KV heads of width 8 on 4 ranks: rank 2 holds the second one, `ReplicatedShards(0, ((0, 8, 8),), 16)`.

    Args:
        dim: Dimension that is sharded.
        segments: For each replicated segment of this rank: its start in the local tensor, its start among all
            replicated segments side by side, and its length.
        length: Of all replicated segments side by side.
    """

    dim: int
    segments: tuple[tuple[int, int, int], ...]
    length: int

    @classmethod
    def of(cls, sharding: TensorSharding, rank: int) -> ReplicatedShards | None:
        """The replicated shards on a rank; None: no two ranks hold the same."""
        bounds = sorted({bound for ranges in sharding.ranges for pair in ranges for bound in pair})
        slots, length = {}, 0
        for start, stop in pairwise(bounds):
            if sum(first <= start < last for ranges in sharding.ranges for first, last in ranges) > 1:
                slots[start] = length, stop - start
                length += stop - start
        if not slots:
            return None
        segments, at = [], 0
        for first, last in sharding.ranges[rank]:
            segments += [(at + start - first, slot, n) for start, (slot, n) in slots.items() if first <= start < last]
            at += last - first
        return cls(sharding.dim, tuple(segments), length)

    def sum(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sums a gradient over the ranks that hold the same, in place; all of them get the same bits.

        Comm: one all-reduce over `group`, the bytes of all replicated segments.
        """
        shape = list(gradient.shape)
        shape[self.dim] = self.length
        pieces = gradient.new_zeros(shape)
        for at, slot, length in self.segments:
            pieces.narrow(self.dim, slot, length).copy_(gradient.narrow(self.dim, at, length))
        pieces = start_all_reduce(pieces, group).wait()
        for at, slot, length in self.segments:
            gradient.narrow(self.dim, at, length).copy_(pieces.narrow(self.dim, slot, length))
        return gradient
