"""Which tensor-parallel sizes a model allows, by the numbers of its undivided units, such as heads. Pure.

The check of a config and the one at load share it, so that both name the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, order=True)
class Unit:
    """Equal parts that are assigned to the tensor-parallel ranks undivided.

    Args:
        name: What they are, in the plural: `attention heads`, `rows of mlp.up_proj`.
        number: How many there are.
        repeats: Whether several ranks may hold the same one where the ranks are more, as with KV heads.
    """

    name: str
    number: int
    repeats: bool = False

    def allows(self, tp: int) -> bool:
        """Whether each of `tp` ranks gets equally many, or each unit is held by equally many ranks."""
        return self.number % tp == 0 or (self.repeats and tp % self.number == 0)

    def per_rank(self, tp: int) -> int:
        """How many a rank holds, of a size that is allowed."""
        return max(1, self.number // tp)

    def replicas(self, tp: int) -> int:
        """How many ranks hold each, of a size that is allowed."""
        return max(1, tp // self.number)


def working_sizes(units: Iterable[Unit]) -> list[int]:
    """Every tensor-parallel size that all units allow; one at least of them must not repeat.

    Example:
        9 heads, 3 KV heads and a width of 1536 allow 1 and 3.
    """
    units = list(units)
    most = gcd(*(unit.number for unit in units if not unit.repeats))
    return [size for size in range(1, most + 1) if most % size == 0 and all(unit.allows(size) for unit in units)]


def tp_size_problem(tp: int, units: Iterable[Unit]) -> tuple[str, str, str] | None:
    """The three parts of an error about a size that does not divide a model; None: it does.

    Args:
        tp: Tensor-parallel size.
        units: All that the plan assigns undivided.
    """
    units = list(units)
    broken: dict[int, str] = {}
    for unit in units:
        if not unit.allows(tp):
            broken.setdefault(unit.number, unit.name)  # Of layers that have the same number one is named.
    if not broken:
        return None
    sizes = working_sizes(units)
    works = "1" if sizes == [1] else f"a size that works: {', '.join(map(str, sizes))}"
    return (
        f"parallel.tp is {tp}, and the model has {', '.join(f'{n} {name}' for n, name in broken.items())}",
        "each tensor-parallel rank holds equally many, undivided; KV heads that are fewer than the ranks are repeated "
        "where their number divides the number of ranks",
        f"set parallel.tp to {works}",
    )
