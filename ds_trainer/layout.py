"""Which part of which full tensor a rank owns. Pure: load, save, reshard and export all speak in these terms.

Names are the Hugging Face parameter names of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def boxes(self) -> list[Box]:
        """The slice as boxes of the full tensor, in the order of its flattened elements.

        A flat range rarely begins and ends with a row: an n-dimensional one takes up to 2n - 1 boxes.

        Example:
            Elements 2 to 9 of a (3, 4) matrix: the end of row 0, row 1, the first element of row 2.
        """
        corner = tuple(start for start, _ in self.block)
        sizes = tuple(stop - start for start, stop in self.block)
        return [
            Box(tuple(a + b for a, b in zip(corner, offsets, strict=True)), box)
            for offsets, box in _boxes(sizes, *self.flat)
        ]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a full tensor.

    Args:
        offsets: First index in each dimension.
        sizes: Length in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


def _boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that together are the flat elements `start` to `stop` of a tensor, in order."""
    if start >= stop:
        return
    if len(sizes) < 2:
        yield (start,) * len(sizes), (stop - start,) * len(sizes)
        return
    row = prod(sizes[1:])
    head = min(-(-start // row) * row, stop)  # to the end of a row that begins before `start`
    tail = max(stop // row * row, head)  # from the beginning of a row that ends after `stop`
    for begin, end in ((start, head), (tail, stop)):
        if begin == tail and tail > head:
            yield (head // row, *(0,) * len(sizes[1:])), ((tail - head) // row, *sizes[1:])
        index = begin // row
        for offsets, box in _boxes(sizes[1:], begin - index * row, end - index * row):
            yield (index, *offsets), (1, *box)


def even_flat_range(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `parts` equal flat shards; the last ones are short or empty where they pass the end."""
    size = -(-numel // parts)
    return min(index * size, numel), min((index + 1) * size, numel)


def rows_covering(shape: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """First and one-past-last index of dimension 0 whose rows hold the flat elements `start` to `stop`."""
    row = prod(shape[1:])
    return start // row, -(-stop // row)
