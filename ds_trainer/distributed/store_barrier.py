"""Barriers that wait for any time, such as for a rank that prepares its data: a collective would time out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import UserError
from ds_trainer.health.expected_wait import expected_wait
from ds_trainer.torch_internals import default_store

_POLL_S = 0.05
_BEFORE_EXIT_S = 20.0
_counts: Counter[str] = Counter()


@contextmanager
def barrier_after(mesh: Mesh, place: str) -> Iterator[None]:
    """Runs a block that may take any time, then waits until all ranks have run it or failed in it.

    A rank that ends meanwhile ends all ranks, as everywhere.

    Args:
        mesh: The ranks.
        place: The block's name, the same on every rank.

    Comm: a counter in the group's store; no collective.
    """
    mesh.monitor.at(place)
    with expected_wait():
        try:
            yield
        except UserError:  # The next consensus raises it on all ranks; any other exception ends all at once.
            _wait_for_all(mesh.grid.world, place)
            raise
        _wait_for_all(mesh.grid.world, place)


def barrier_before_exit(mesh: Mesh, place: str) -> None:
    """Waits for the other ranks before this one ends: a launcher kills them once one has ended with an error.

    Waits for a limited time: a rank may have ended by itself.
    """
    with suppress(dist.DistError):  # Rank 0, which serves the store, is done.
        _wait_for_all(mesh.grid.world, place, limit_s=_BEFORE_EXIT_S)


def _wait_for_all(world: int, place: str, limit_s: float = float("inf")) -> None:
    if world == 1:
        return
    _counts[place] += 1
    key, store = f"ds_trainer/{place}/{_counts[place]}", default_store()
    arrived, began = store.add(key, 1), time.monotonic()
    while arrived < world and time.monotonic() - began < limit_s:
        time.sleep(_POLL_S)
        arrived = store.add(key, 0)
