"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from ds_trainer.mesh.mesh import Mesh

NormType = Literal["l2", "inf"]


def global_norm(gradients: Sequence[torch.Tensor], norm_type: NormType = "l2") -> torch.Tensor:
    """Norm over all elements of plain gradients, in fp64: for L2 of their rows in fp32, of the rows' norms in fp64.

    In fp32 alone torch sums a tensor of a million elements on one CPU core with a relative error of 2e-4, which
    clipping would carry into every weight; in fp64 alone it takes 4 to 25 times as long.
    """
    order = {"l2": 2.0, "inf": float("inf")}[norm_type]
    # An empty shard has no largest element, which torch refuses.
    rows = [torch.linalg.vector_norm(g, order, dim=-1) for g in gradients if g.numel()]
    norms = [torch.linalg.vector_norm(row, order, dtype=torch.float64) for row in rows]
    return torch.linalg.vector_norm(torch.stack(norms), order) if norms else torch.zeros((), dtype=torch.float64)


def norm_over_shards(norm: torch.Tensor, norm_type: NormType, mesh: Mesh, copies: int) -> torch.Tensor:
    """The norm over all ranks' shards, on every rank; inf where any is not finite.

    Args:
        norm: The norm of this rank's shards.
        norm_type: Which norm.
        mesh: Process groups.
        copies: On how many ranks each shard lies.

    Comm: one all-reduce of 8 bytes over `dp_host_group`.
    """
    value = norm.double().cpu()
    if norm_type == "l2":
        total = value.square()
        dist.all_reduce(total, group=mesh.dp_host_group)
        return (total / copies).sqrt()
    # A maximum would drop NaN.
    total = torch.where(value.isfinite(), value, torch.inf)
    dist.all_reduce(total, dist.ReduceOp.MAX, group=mesh.dp_host_group)
    return total


def clip_by_norm(gradients: Sequence[torch.Tensor], limit: float, norm: float) -> None:
    """Scales plain gradients by limit / (norm + 1e-6) where that is below 1, as torch does; limit 0: no clipping."""
    scale = limit / (norm + 1e-6)
    if limit and scale < 1.0:
        torch._foreach_mul_(list(gradients), scale)
