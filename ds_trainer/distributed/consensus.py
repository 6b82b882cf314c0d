"""All ranks agree, around whatever all of them must do, on where they are, on errors, and on stopping.

One all-reduce of a fixed number of float64 carries everything. Ranks at different places, which is where a call made
on only some ranks leads to, thus enter the same collective and notice the difference.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import DesyncError, UserError
from ds_trainer.health.stacks import call_site
from ds_trainer.launch import signals

MAX_VALUES = 4


@dataclass
class Consensus:
    """What all ranks know after they have agreed.

    Args:
        values: This rank's numbers, at most `MAX_VALUES`, to be set before the end of the block.
        sums: Their sums over the data-parallel ranks; all ranks of one model replica have the same numbers, which count
            once.
        stop: Whether any rank was asked to stop.
    """

    values: Sequence[float] = ()
    sums: tuple[float, ...] = ()
    stop: bool = False


def agree(mesh: Mesh, place: str, *values: float) -> Consensus:
    """Agrees with all ranks at a place that user code may have brought only some of them to.

    Args:
        mesh: The ranks.
        place: Its name, the same on every rank, such as "step 4" or "save_model()".
        values: Numbers to sum over the data-parallel ranks, at most `MAX_VALUES`.

    Comm: one all-reduce of 8 float64 over all ranks.

    Raises:
        DesyncError: Ranks are at different places; on every rank.
    """
    with consensus(mesh, place) as outcome:
        outcome.values = values
    return outcome


@contextmanager
def consensus(mesh: Mesh, place: str) -> Iterator[Consensus]:
    """Runs a block that may fail on some ranks; then all ranks go on, or all raise the first failing rank's error.

    Comm: that of `agree` at the end of the block; one gather of places and errors if it failed.

    Raises:
        UserError: The error of the lowest rank that raised one, its text names that rank if others did not fail.
        DesyncError: Ranks are at different places.
    """
    outcome, own_error = Consensus(), None
    try:
        yield outcome
    except UserError as caught:
        own_error = caught
    count, tag = len(outcome.values), _tag(place)
    padding = [0.0] * (MAX_VALUES - count)
    with mesh.monitor.waiting_at(place):
        tags, squares, failed, stop, *sums = mesh.sum_over_world(
            tag, tag * tag, own_error is not None, signals.pending(), *outcome.values, *padding
        )
        all_well = not failed and mesh.grid.world * int(squares) == int(tags) ** 2
        reports = [] if all_well else mesh.gather_over_world((place, call_site(sys._getframe()), own_error))
    if not all_well:
        raise _first_error(reports, mesh.grid.rank, own_error)
    outcome.sums, outcome.stop = tuple(total / mesh.grid.model_size for total in sums[:count]), stop > 0


def _tag(place: str) -> int:
    """20 bits, so that sums of squares over 4096 ranks are exact in float64."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=3).digest()) >> 4


def _first_error(reports: list, rank: int, own_error: UserError | None) -> UserError:
    """The error of the lowest rank that has one, else a DesyncError; a report is (place, call site, error or None)."""
    errors = [error for _, _, error in reports]
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if not failed:
        first: UserError = _desync([(place, site) for place, site, _ in reports])
    else:
        # This rank's own object has its traceback; another rank's has come through a pickle.
        first = own_error if own_error is not None and failed[0] == rank else errors[failed[0]]
        if len(failed) < len(errors):
            first.args = (f"on rank {failed[0]}: {first.args[0]}",)
    first.on_all_ranks = True
    return first


def _desync(locations: list[tuple[str, str]]) -> DesyncError:
    """Names the place with the fewest ranks, a call rather than a step; a location is (place, call site)."""
    ranks: dict[str, list[int]] = {}
    for rank, (place, _) in enumerate(locations):
        ranks.setdefault(place, []).append(rank)
    few, *others = sorted(ranks, key=lambda place: (len(ranks[place]), not place.endswith("()"), ranks[place]))
    elsewhere = "; ".join(f"ranks {ranks[place]} are at {place} ({locations[ranks[place][0]][1]})" for place in others)
    return DesyncError.entered_by_some(few, ranks[few], locations[ranks[few][0]][1], elsewhere)
