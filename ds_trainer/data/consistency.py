"""Checks that ranks hold the same data: all of them the same data set, those of one model copy the same micro-batches.

Data sets are compared once, before the first step: this program assigns samples to data-parallel ranks, so each of them
must hold the full data set. Micro-batches are compared in every step where the tensor- and pipeline-parallel ranks of a
model copy compute one forward pass together; that costs one number more in a sum that the step needs anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.microbatch import BatchMaker
from ds_trainer.data.seeding import preserved_rng
from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import DataError
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.loss import Batch

_BATCH_DIGEST_BYTES = 5
"""So few that sums over thousands of ranks are exact in float64."""


@dataclass(frozen=True)
class _DatasetSummary:
    """What ranks compare of their data sets.

    Args:
        length: Number of samples; None: the rank has no data set.
        probes: Digests of the first, middle and last sample; None: they cannot be compared.
    """

    length: int | None
    probes: tuple[str | None, ...] | None = None


def check_same_dataset(loader: BatchLoader | None, mesh: Mesh, what: str) -> tuple[str | None, ...] | None:
    """Refuses data sets that differ between ranks in length or in their first, middle or last sample.

    Comm: a consensus that all ranks can read their samples, and one gather of about 200 bytes.

    Args:
        loader: This rank's loader; None where it has no such data.
        mesh: Process groups.
        what: `train`, `eval` or `test`, for error texts.

    Returns:
        Digests of the first, middle and last sample; None where there is no data or they cannot be compared.

    Raises:
        UserError: They differ, or a rank cannot read a sample; on every rank.
    """
    with consensus(mesh, f"the check of data.{what}"):
        own = _DatasetSummary(None) if loader is None else _summarise(loader.maker)
    summaries: list[_DatasetSummary] = mesh.gather_over_world(own)
    if len({each.length for each in summaries}) > 1:
        lengths = (f"{'none' if each.length is None else each.length} on rank {i}" for i, each in enumerate(summaries))
        raise _dataset_error(f"the samples of data.{what} are {', '.join(lengths)}")
    if None not in (probes := [each.probes for each in summaries]) and len(set(probes)) > 1:
        others = [i for i, each in enumerate(probes) if each != probes[0]]
        raise _dataset_error(f"data.{what} holds other samples on ranks {others} than on rank 0")
    return own.probes


def _dataset_error(found: str) -> DataError:
    error = DataError(
        found,
        "every rank holds the same data set; ds_trainer assigns the samples of each step to the ranks",
        "pass the same data set to Trainer on every rank, neither split by rank nor drawn with a seed of the rank",
    )
    error.on_all_ranks = True
    return error


def _summarise(maker: BatchMaker) -> _DatasetSummary:
    length = len(maker.dataset)
    with preserved_rng():
        first, second = (tuple(_sample_digest(maker.sample(i)) for i in (0, length // 2, length - 1)) for _ in range(2))
    # A sample that differs between two reads is random, and so may differ between ranks as well.
    return _DatasetSummary(length, first if first == second and None not in first else None)


def _sample_digest(sample: Any) -> str | None:
    """Digest of a sample's text, integers and shapes; None where it holds something else."""
    try:
        return hashlib.blake2b(json.dumps(_comparable(sample)).encode(), digest_size=16).hexdigest()
    except TypeError:
        return None


def _comparable(value: Any) -> Any:
    """The part of a sample that is equal on any machine: computed floats and decoded pixels differ in last places."""
    match value:
        case Mapping():
            return {str(key): _comparable(item) for key, item in value.items()}
        case list() | tuple():
            return [_comparable(item) for item in value]
        case float():
            return "float"
        case torch.Tensor():
            return _comparable(value.numpy(force=True))
        case np.ndarray() | np.generic():
            exact = value.dtype.kind in "iu" and value.dtype.itemsize > 1
            return value.tolist() if exact else [str(value.dtype), list(value.shape)]
    return value


def batch_digest(batches: Sequence[Batch], grid: Grid) -> int:
    """A number computed from every value of some micro-batches; 0 where a rank holds the model alone."""
    if grid.model_size == 1:
        return 0
    hashed = hashlib.blake2b(digest_size=_BATCH_DIGEST_BYTES)
    for batch in batches:
        for name, value in sorted(batch.items()):
            hashed.update(name.encode())
            if torch.is_tensor(value):
                hashed.update(value.reshape(-1).view(torch.uint8).numpy().data)
            else:
                hashed.update(repr(value).encode())
    return int.from_bytes(hashed.digest())


def digest_term(own: int, grid: Grid) -> float:
    """This rank's term of a sum over all ranks that is 0 where the ranks of every model copy have the same digest.

    Example:
        On 3 ranks of a copy with digests a, b and c the sum is 2a - b - c.
    """
    is_first = grid.tp_rank == 0 and grid.pp_rank == 0
    return float(own * (grid.model_size - 1 if is_first else -1))


def check_same_batches(total: float, own: int, mesh: Mesh, place: str) -> None:
    """Raises where ranks of one model copy hold different micro-batches.

    Args:
        total: Sum over all ranks of `digest_term`.
        own: This rank's digest.
        mesh: Process groups.
        place: The step or batch, for the text.

    Comm: a gather of the digests if they differ, else none.

    Raises:
        DataError: They differ; on every rank.
    """
    if total == 0:
        return
    digests = mesh.gather_over_world(own)
    groups = ([(rank, digests[rank]) for rank in ranks] for ranks in mesh.grid.model_ranks)
    differing = next(group for group in groups if len({value for _, value in group}) > 1)
    error = DataError(
        f"{place}: ranks that share one copy of the model hold different samples ("
        + ", ".join(f"rank {rank}: hash {value:0{2 * _BATCH_DIGEST_BYTES}x}" for rank, value in differing)
        + ")",
        "with parallel.tp and parallel.pp all ranks of a model copy compute on the same micro-batches",
        "let samples depend on their index alone: no shuffling, sampling or augmentation that depends on the rank or "
        "on a seed that differs between ranks",
    )
    error.on_all_ranks = True
    raise error
