"""Rank arithmetic: which coordinates on the mesh a rank has. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """A world of ranks laid out along two mesh axes, `dp` and, innermost, `tp`: tensor ranks are neighbours on a node.

    Example:
        4 ranks with tp 2: ranks 0 and 1 hold the two parts of one model and see the same samples, 2 and 3 likewise.

    Args:
        world: Number of ranks.
        rank: This rank, 0 <= rank < world.
        local_rank: This rank's number on its node.
        local_world: Ranks on this node.
        tp_size: Ranks that share one copy of the model, each holding a part of its layers; divides `world`.
    """

    world: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world: int = 1
    tp_size: int = 1

    @property
    def tp_rank(self) -> int:
        """This rank's number among those that share its copy of the model."""
        return self.rank % self.tp_size

    @property
    def dp_size(self) -> int:
        """Number of data ranks: ranks that see different samples."""
        return self.world // self.tp_size

    @property
    def dp_rank(self) -> int:
        """This rank's number among the data ranks; all tensor ranks of one model copy have the same."""
        return self.rank // self.tp_size

    @property
    def dp_ranks(self) -> list[list[int]]:
        """For each tensor rank the ranks that hold the same part of the model, in data order."""
        return [list(range(first, self.world, self.tp_size)) for first in range(self.tp_size)]

    @property
    def tp_ranks(self) -> list[list[int]]:
        """For each data rank the ranks that share its copy of the model, in tensor order."""
        return [list(range(first, first + self.tp_size)) for first in range(0, self.world, self.tp_size)]
