"""Which part of which full tensor a rank owns. Pure: load, save, reshard and export all speak in these terms.

Names are the Hugging Face parameter names of the unsplit model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class ParameterSlice:
    """One rank's part of one parameter: a block of the full tensor, and a range of that block's flattened elements.

    Example:
        ZeRO on 2 ranks cuts a (3, 4) matrix flat: rank 0 owns `ParameterSlice("w", (3, 4), ((0, 3), (0, 4)), (0, 6))`.

    Args:
        name: Hugging Face parameter name.
        shape: Shape of the full tensor.
        block: Start and stop in each dimension.
        flat: Start and stop in the row-major flattened block.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[tuple[int, int], ...]
    flat: tuple[int, int]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> ParameterSlice:
        """The slice of a rank that owns the full tensor."""
        return cls(name, tuple(shape), tuple((0, n) for n in shape), (0, prod(shape)))

    @classmethod
    def flat_range(cls, name: str, shape: tuple[int, ...], start: int, stop: int) -> ParameterSlice:
        """The slice of a rank that owns elements `start` to `stop` of the row-major flattened full tensor."""
        return cls(name, tuple(shape), tuple((0, n) for n in shape), (start, stop))

    @property
    def numel(self) -> int:
        """Number of elements owned."""
        return self.flat[1] - self.flat[0]


def even_flat_range(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `parts` equal flat shards; the last ones are short or empty where they pass the end."""
    size = -(-numel // parts)
    return min(index * size, numel), min((index + 1) * size, numel)


def rows_covering(shape: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """First and one-past-last index of dimension 0 whose rows hold the flat elements `start` to `stop`."""
    row = prod(shape[1:])
    return start // row, -(-stop // row)
