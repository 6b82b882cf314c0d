"""Ranks of one model copy compute one forward pass together, so they must hold the same micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import DataError
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.loss import Batch

_DIGEST_BYTES = 5
"""So few that sums over thousands of ranks are exact in float64."""


def digest(batches: Sequence[Batch], grid: Grid) -> int:
    """A number that follows from every tensor of some micro-batches; 0 where a rank holds the model alone."""
    if grid.model_size == 1:
        return 0
    hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for batch in batches:
        for name, value in sorted(batch.items()):
            hashed.update(name.encode())
            if torch.is_tensor(value):
                hashed.update(value.reshape(-1).view(torch.uint8).numpy().data)
            else:
                hashed.update(repr(value).encode())
    return int.from_bytes(hashed.digest())


def difference(own: int, grid: Grid) -> float:
    """This rank's term of a sum over all ranks that is 0 where the ranks of every model copy have one digest.

    Example:
        On 3 ranks of a copy with digests a, b and c the sum is 2a - b - c.
    """
    is_first = grid.tp_rank == 0 and grid.pp_rank == 0
    return float(own * (grid.model_size - 1 if is_first else -1))


def require_same(total: float, own: int, mesh: Mesh, place: str) -> None:
    """Refuses to go on where ranks of one model copy hold different micro-batches.

    Args:
        total: Sum of every rank's `difference`.
        own: This rank's digest.
        mesh: Process groups.
        place: The step or batch, for the text.

    Comm: a gather of the digests if they differ, else none.

    Raises:
        DataError: They do; on every rank.
    """
    if total == 0:
        return
    digests = mesh.gather_objects(own)
    groups = ([(rank, digests[rank]) for rank in ranks] for ranks in mesh.grid.model_ranks)
    first = next(group for group in groups if len({value for _, value in group}) > 1)
    error = DataError(
        f"{place}: ranks that share one copy of the model hold different samples ("
        + ", ".join(f"rank {rank}: hash {value:0{2 * _DIGEST_BYTES}x}" for rank, value in first)
        + ")",
        "with parallel.tp and parallel.pp all ranks of a model copy compute on the same micro-batches",
        "let samples depend on their index alone: no shuffling, sampling or augmentation of your own that depends on "
        "the rank or on a seed of its own",
    )
    error.agreed = True
    raise error
