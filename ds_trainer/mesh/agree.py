"""Ranks agree on an error before the next collective, so that a fault on one rank ends all with that rank's text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ds_trainer.errors import UserError
from ds_trainer.mesh.mesh import Mesh


@contextmanager
def agreed(mesh: Mesh) -> Iterator[None]:
    """Runs a block that may fail on some ranks; then all ranks go on, or all raise the first failing rank's error.

    Comm: one all-reduce of a number over the data ranks at the end of the block; one gather of the texts if it failed.

    Raises:
        UserError: The error of the lowest rank that raised one, its text naming that rank where others did not fail.
    """
    mine: UserError | None = None
    try:
        yield
    except UserError as caught:
        mine = caught
    if mesh.sum(mine is not None) == [0.0]:
        return
    errors = mesh.gather_objects(mine)
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    # Our own object keeps its traceback; another rank's has come through a pickle.
    first = mine if mine is not None and failed[0] == mesh.grid.rank else errors[failed[0]]
    if len(failed) < len(errors):
        first.args = (f"on rank {failed[0]}: {first.args[0]}",)
    first.agreed = True
    raise first
