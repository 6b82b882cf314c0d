"""Every rank must hold the same data set: this program cuts one over the ranks, not the user."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.microbatch import BatchMaker
from ds_trainer.data.rng import own_streams_kept
from ds_trainer.distributed.consensus import agreed
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import DataError


@dataclass(frozen=True)
class _Seen:
    """What a rank knows of its data set.

    Args:
        length: Number of samples; None: it has no data set.
        probes: Digests of the first, middle and last sample; None: they cannot be compared.
    """

    length: int | None
    probes: tuple[str | None, ...] | None = None


def same_everywhere(loader: BatchLoader | None, mesh: Mesh, what: str) -> tuple[str | None, ...] | None:
    """Refuses data sets that differ between ranks in length or in the samples at their ends and middle.

    Comm: over the data ranks, an agreement that all can read their samples, and one gather of about 200 bytes.

    Args:
        loader: This rank's loader; None where it has no such data.
        mesh: This rank's place.
        what: `train`, `eval` or `test`, for the text.

    Returns:
        Digests of the first, middle and last sample; None where there is no data or they cannot be compared.

    Raises:
        UserError: They differ, or a rank cannot read a sample; on every rank.
    """
    with agreed(mesh, f"the look at data.{what}"):
        mine = _Seen(None) if loader is None else _look_at(loader.maker)
    seen: list[_Seen] = mesh.gather_objects(mine)
    if len({one.length for one in seen}) > 1:
        lengths = (f"{'none' if one.length is None else one.length} on rank {i}" for i, one in enumerate(seen))
        raise _differ(f"the samples of data.{what} are {', '.join(lengths)}")
    if None not in (probes := [one.probes for one in seen]) and len(set(probes)) > 1:
        others = [i for i, one in enumerate(probes) if one != probes[0]]
        raise _differ(f"data.{what} holds other samples on ranks {others} than on rank 0")
    return mine.probes


def _differ(found: str) -> DataError:
    error = DataError(
        found,
        "every rank holds the whole data set, the same one: ds_trainer itself gives each rank its share of every step",
        "hand the same data set to Trainer on every rank, neither split by rank nor drawn with a seed of the rank",
    )
    error.agreed = True
    return error


def _look_at(maker: BatchMaker) -> _Seen:
    length = len(maker.dataset)
    with own_streams_kept():
        first, second = (tuple(_digest(maker.sample(i)) for i in (0, length // 2, length - 1)) for _ in range(2))
    # A sample that is not the same twice is drawn anew each time, and so may differ between ranks as well.
    return _Seen(length, first if first == second and None not in first else None)


def _digest(sample: Any) -> str | None:
    """Digest of a sample's text, whole numbers and shapes; None where it holds something else."""
    try:
        return hashlib.blake2b(json.dumps(_comparable(sample)).encode(), digest_size=16).hexdigest()
    except TypeError:
        return None


def _comparable(value: Any) -> Any:
    """Only what equal data sets have equal on any machine: computed floats and decoded pixels differ in last places."""
    match value:
        case Mapping():
            return {str(key): _comparable(part) for key, part in value.items()}
        case list() | tuple():
            return [_comparable(part) for part in value]
        case float():
            return "float"
        case torch.Tensor():
            return _comparable(value.numpy(force=True))
        case np.ndarray() | np.generic():
            exact = value.dtype.kind in "iu" and value.dtype.itemsize > 1
            return value.tolist() if exact else [str(value.dtype), list(value.shape)]
    return value
