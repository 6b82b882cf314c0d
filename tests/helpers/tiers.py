"""Which tier a test's parameters run in: `make test`, `make test-all` (slow) or `make test-full` (full)."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import combinations
from typing import Any

import pytest


def tiers(values: Iterable[Any], *, quick: Container[Any] = (), slow: Container[Any] | None = None) -> list:
    """Parameters of a test, each in the first tier that names it.

    Args:
        values: What `pytest.mark.parametrize` takes; a tuple where it has several names.
        quick: Of these, what `make test` runs.
        slow: What `make test-all` runs; without, all others. The rest is left to `make test-full`.
    """

    def marks(value: Any) -> list[pytest.MarkDecorator]:
        if value in quick:
            return []
        return [pytest.mark.slow if slow is None or value in slow else pytest.mark.full]

    return [
        pytest.param(*value, marks=marks(value), id="-".join(map(str, value)))
        if isinstance(value, tuple)
        else pytest.param(value, marks=marks(value))
        for value in values
    ]


def in_pairs(cells: Iterable[tuple]) -> list[tuple]:
    """A small sample of a matrix's cells in which each two values that meet in one of them still meet."""
    left = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    sample: list[tuple] = []
    while left:
        best = max(left, key=lambda cell: len(left[cell]))
        covered = left.pop(best)
        sample.append(best)
        left = {cell: pairs - covered for cell, pairs in left.items() if not pairs <= covered}
    return sample
