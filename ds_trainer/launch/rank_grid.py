"""Rank arithmetic: which coordinates on the mesh a rank has. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """A world of ranks laid out along three mesh axes: `tp` innermost, then `dp`, then `pp`.

    Axes that exchange more are further in, where ranks are neighbours on a node: tensor-parallel ranks sum activations
    in every layer, data-parallel ranks sum gradients once a step, and pipeline stages send one micro-batch's hidden
    states at a time.

    Example:
        8 ranks with pp 2 and tp 2: ranks 0 and 1 hold the two shards of the first stage and see the same samples, ranks
        2 and 3 hold the same shards and see others; ranks 4 to 7 are the second stage. Ranks 0, 1, 4 and 5 are one
        replica of the model.

    Args:
        world: Number of ranks.
        rank: This rank, 0 <= rank < world.
        local_rank: This rank's number on its node.
        local_world: Ranks on this node.
        tp_size: Ranks among which the layers of one pipeline stage are sharded.
        pp_size: Ranks of a pipeline, each with some of the layers; tp_size x pp_size divides `world`.
    """

    world: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world: int = 1
    tp_size: int = 1
    pp_size: int = 1

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one replica of the model together."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """This rank's number along the tp axis."""
        return self.rank % self.tp_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which see different samples."""
        return self.world // self.model_size

    @property
    def dp_rank(self) -> int:
        """This rank's number along the dp axis, the same on all ranks of one model replica."""
        return self.rank // self.tp_size % self.dp_size

    @property
    def pp_rank(self) -> int:
        """This rank's number in its pipeline."""
        return self.rank // (self.tp_size * self.dp_size)

    @property
    def dp_ranks(self) -> list[list[int]]:
        """The ranks of each data-parallel group, in dp order: they hold the same shards of the model."""
        return [self._ranks(pp, None, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]

    @property
    def tp_ranks(self) -> list[list[int]]:
        """The ranks of each tensor-parallel group, in tp order: they hold one stage of one replica together."""
        return [self._ranks(pp, dp, None) for pp in range(self.pp_size) for dp in range(self.dp_size)]

    @property
    def pp_ranks(self) -> list[list[int]]:
        """The ranks of each pipeline, in stage order."""
        return [self._ranks(None, dp, tp) for dp in range(self.dp_size) for tp in range(self.tp_size)]

    @property
    def model_ranks(self) -> list[list[int]]:
        """The ranks of each replica of the model, in dp order."""
        return [self._ranks(None, dp, None) for dp in range(self.dp_size)]

    def _ranks(self, pp: int | None, dp: int | None, tp: int | None) -> list[int]:
        """All ranks with these coordinates; None: any."""
        sizes = ((pp, self.pp_size), (dp, self.dp_size), (tp, self.tp_size))
        pps, dps, tps = (range(size) if given is None else (given,) for given, size in sizes)
        return [(p * self.dp_size + d) * self.tp_size + t for p in pps for d in dps for t in tps]
