"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from ds_trainer.torch_internals import multiply_all

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


def norm_over_group(
    norm: torch.Tensor, norm_type: NormType, group: dist.ProcessGroup, replicas: int = 1
) -> torch.Tensor:
    """The norm over what the ranks of a group hold, on each of them; inf where any is not finite.

    Args:
        norm: The norm of what this rank holds.
        norm_type: Which norm.
        group: The ranks, over gloo.
        replicas: How many of them count each element.

    Comm: one all-reduce of 8 bytes over `group`; none where it has one rank.
    """
    if group.size() == 1:
        return norm
    value = norm.double().cpu()
    if norm_type == "l2":
        total = value.square()
        dist.all_reduce(total, group=group)
        return (total / replicas).sqrt()
    # A maximum would drop NaN.
    total = torch.where(value.isfinite(), value, torch.inf)
    dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    return total


def clip_by_norm(gradients: Sequence[torch.Tensor], limit: float, norm: float) -> None:
    """Scales plain gradients by limit / (norm + 1e-6) where that is below 1, as torch does; limit 0: no clipping."""
    scale = limit / (norm + 1e-6)
    if limit and scale < 1.0:
        multiply_all(list(gradients), scale)
