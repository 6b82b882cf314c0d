"""Rank arithmetic: which coordinates on the mesh a rank has. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """A world of ranks laid out along mesh axes; today one axis, `dp`.

    Args:
        world: Number of ranks.
        rank: This rank, 0 <= rank < world.
        local_rank: This rank's number on its node.
        local_world: Ranks on this node.
    """

    world: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world: int = 1

    @property
    def dp_size(self) -> int:
        """Number of data ranks: ranks that see different samples."""
        return self.world

    @property
    def dp_rank(self) -> int:
        """This rank's number among the data ranks."""
        return self.rank
