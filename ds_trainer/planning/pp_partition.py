"""Which layers each stage of a pipeline gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from ds_trainer.planning.pp_costs import Costs, StageRanges

_ROUNDING = 1 + 1e-9
"""Sums of the same costs in another order are equal up to this factor."""


def partition(costs: Costs, num_stages: int) -> StageRanges:
    """Assigns layers so that the slowest stage, for which all others wait, is as fast as possible.

    Of several such partitions, takes the one whose stages are most alike: the least sum of their squared costs.

    Args:
        costs: What precedes the layers is the first stage's work, what follows them the last's.
        num_stages: Each has one layer at least, so that there are no more stages than layers.

    Example:
        5 equal layers on 2 stages, and a head that costs as much as one layer: 3 layers and 2.
    """
    work = list(costs.layers)
    work[0] += costs.first
    work[-1] += costs.last
    assert 0 < num_stages <= len(work), f"{num_stages} stages of {len(work)} layers"
    sums = [0.0, *accumulate(work)]
    return _most_even(sums, num_stages, _least_bound(sums, num_stages) * _ROUNDING)


def split_of(pp_split: Iterable[int]) -> StageRanges:
    """The layers of every stage, given their numbers."""
    return tuple(pairwise(accumulate(pp_split, initial=0)))


def _least_bound(sums: Sequence[float], num_stages: int) -> float:
    """The cost of the slowest stage, at best: found among the costs of all runs of layers by bisection."""
    bounds = sorted({stop - start for end, stop in enumerate(sums) for start in sums[:end]})
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(sums, bounds[middle] * _ROUNDING) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return bounds[low]


def _stages_needed(sums: Sequence[float], bound: float) -> float:
    """The fewest stages that cost no more than `bound`, each filled as far as possible."""
    count, start = 1, 0
    for stop in range(1, len(sums)):
        if sums[stop] - sums[stop - 1] > bound:
            return float("inf")
        if sums[stop] - sums[start] > bound:
            count, start = count + 1, stop - 1
    return count


def _most_even(sums: Sequence[float], num_stages: int, bound: float) -> StageRanges:
    """Stages of a cost within the bound whose squares add up to least, by dynamic programming over where they end."""
    num_layers = len(sums) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(1, num_stages + 1):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (squares, ends) in best.items():
            for stop in range(start + 1, num_layers - (num_stages - stage) + 1):
                cost = sums[stop] - sums[start]
                if cost > bound:
                    break
                if stop not in reached or squares + cost * cost < reached[stop][0]:
                    reached[stop] = squares + cost * cost, (*ends, stop)
        best = reached
    return tuple(pairwise(best[num_layers][1]))
