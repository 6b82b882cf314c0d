"""Which part of which full tensor a rank owns. Pure: load, save, reshard and export all speak in these terms.

Names are the Hugging Face parameter names of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts one parameter: along one dimension, each rank's part a row of ranges of it.

    A packed parameter is cut part by part, so that a rank holds several ranges; of KV heads that are fewer than the
    ranks, several ranks hold the same range; of a vocabulary that does not divide, the last ranks hold padding.

    Example:
        Gate and up projection packed in 8 rows, on 2 ranks: `Cut((8, 4), 0, (((0, 2), (4, 6)), ((2, 4), (6, 8))), 4)`.

    Args:
        shape: Shape of the full tensor.
        dim: Dimension that is cut.
        ranges: For each rank the ranges (start, stop) of that dimension that it holds, in the order it holds them.
        length: Size of that dimension on a rank, the same on all; what the ranges leave open is padding at the end.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    length: int

    @classmethod
    def even(cls, shape: tuple[int, ...], dim: int, size: int, parts: tuple[int, ...] | None = None) -> Cut:
        """Equal ranges for `size` ranks, of each part of the dimension by itself.

        Args:
            shape: Shape of the full tensor.
            dim: Dimension to cut, from 0.
            size: Number of ranks; divides every part.
            parts: Lengths of the parts that are packed along the dimension; None: one part.
        """
        parts = parts or (shape[dim],)
        starts = [sum(parts[:i]) for i in range(len(parts))]
        each = [n // size for n in parts]
        ranges = tuple(
            tuple((start + rank * n, start + (rank + 1) * n) for start, n in zip(starts, each, strict=True))
            for rank in range(size)
        )
        return cls(tuple(shape), dim, ranges, sum(each))

    @classmethod
    def padded(cls, shape: tuple[int, ...], size: int) -> Cut:
        """Equal numbers of rows for `size` ranks, the last ones padded."""
        ranges = tuple((even_flat_range(shape[0], size, rank),) for rank in range(size))
        return cls(tuple(shape), 0, ranges, -(-shape[0] // size))

    @classmethod
    def repeated(cls, shape: tuple[int, ...], dim: int, size: int, units: int) -> Cut:
        """One of `units` equal units for each of `size` ranks, `size / units` neighbouring ranks holding the same one.

        Args:
            shape: Shape of the full tensor.
            dim: Dimension to cut.
            size: Number of ranks, a multiple of `units`.
            units: Such as KV heads.
        """
        n, copies = shape[dim] // units, size // units
        ranges = tuple(((rank // copies * n, (rank // copies + 1) * n),) for rank in range(size))
        return cls(tuple(shape), dim, ranges, n)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the parameter on a rank, padding included."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class ParameterSlice:
    """One rank's part of one parameter: a range of the flattened elements of what tensor parallelism leaves of it.

    Example:
        ZeRO on 2 ranks cuts a (3, 4) matrix flat: rank 0 owns `ParameterSlice("w", (3, 4), (0, 6))`.

    Args:
        name: Hugging Face parameter name.
        shape: Shape of the full tensor.
        flat: Start and stop in the row-major flattened local tensor.
        cut: How tensor parallelism cuts the full tensor; None: not at all, the local tensor is the full one.
        rank: Tensor rank, which says which ranges of the cut are meant.
    """

    name: str
    shape: tuple[int, ...]
    flat: tuple[int, int]
    cut: Cut | None = None
    rank: int = 0

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> ParameterSlice:
        """The slice of a rank that owns the full tensor."""
        return cls(name, tuple(shape), (0, prod(shape)))

    @classmethod
    def flat_range(cls, name: str, shape: tuple[int, ...], start: int, stop: int) -> ParameterSlice:
        """The slice of a rank that owns elements `start` to `stop` of the row-major flattened full tensor."""
        return cls(name, tuple(shape), (start, stop))

    @property
    def numel(self) -> int:
        """Number of elements owned, padding included."""
        return self.flat[1] - self.flat[0]

    def boxes(self) -> list[Box]:
        """The slice as boxes of the full tensor, in the order of its flattened elements; padding, at the end, is none.

        A flat range rarely begins and ends with a row: an n-dimensional one takes up to 2n - 1 boxes.

        Example:
            Elements 2 to 9 of a (3, 4) matrix: the end of row 0, row 1, the first element of row 2.
        """
        local = self.shape if self.cut is None else self.cut.local_shape
        boxes = [Box(offsets, sizes) for offsets, sizes in _boxes(local, *self.flat)]
        if self.cut is None:
            return boxes
        ranges, dim = self.cut.ranges[self.rank], self.cut.dim
        return [full for box in boxes for full in _in_full(box, dim, ranges)]


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


def _in_full(box: Box, dim: int, ranges: tuple[tuple[int, int], ...]) -> Iterator[Box]:
    """The boxes of the full tensor that a box of the local one holds, in the order of its flattened elements."""
    first, last = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    pieces, at = [], 0
    for start, stop in ranges:
        begin, end = max(first, at), min(last, at + stop - start)
        if begin < end:
            pieces.append((start + begin - at, end - begin))
        at += stop - start
    if len(pieces) == 1:
        leading: Iterable[tuple[tuple[int, ...], tuple[int, ...]]] = [(box.offsets[:dim], box.sizes[:dim])]
    else:  # What lies side by side in one row of the local tensor does not in the full one.
        rows = product(*(range(o, o + n) for o, n in zip(box.offsets[:dim], box.sizes[:dim], strict=True)))
        leading = [(row, (1,) * dim) for row in rows]
    for offsets, sizes in leading:
        for start, length in pieces:
            yield Box((*offsets, start, *box.offsets[dim + 1 :]), (*sizes, length, *box.sizes[dim + 1 :]))


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
