"""Which part of which full tensor a rank owns. Pure: load, save, reshard and export all speak in these terms.

Names are the Hugging Face parameter names of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any


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

    def first_holder(self, rank: int) -> int:
        """The first of the ranks that hold the same part as `rank`."""
        return self.ranges.index(self.ranges[rank])

    def first_held(self, rank: int) -> list[tuple[int, int]]:
        """Ranges of a rank's own length that no rank below it holds too, padding left out."""
        bounds = sorted({bound for ranges in self.ranges for pair in ranges for bound in pair})
        below = [pair for ranges in self.ranges[:rank] for pair in ranges]
        own, at = [], 0
        for first, last in self.ranges[rank]:
            for start, stop in pairwise(bound for bound in bounds if first <= bound <= last):
                if not any(a <= start < b for a, b in below):
                    own.append((at, at + stop - start))
                at += stop - start
        return own


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

    def parts(self) -> Iterator[Part]:
        """The slice as boxes of the full tensor; padding is in none of them.

        A flat range rarely begins and ends with a row: an n-dimensional one takes up to 2n - 1 boxes of the local
        tensor, each of which lies in as many boxes of the full one as it meets ranges of the cut.

        Example:
            Elements 2 to 9 of a (3, 4) matrix: the end of row 0, row 1, the first element of row 2.
        """
        local = self.shape if self.cut is None else self.cut.local_shape
        start = 0
        for box in _boxes(local, *self.flat):
            inside = Box.whole(box.sizes)
            if self.cut is None:
                yield Part(start, inside, box, box.sizes)
            else:
                for at, first, length in _met(box, self.cut.dim, self.cut.ranges[self.rank]):
                    dim = self.cut.dim
                    yield Part(start, inside.along(dim, at, length), box.along(dim, first, length), box.sizes)
            start += box.numel


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    Args:
        offsets: First index in each dimension.
        sizes: Length in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """What to index a tensor with."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def along(self, dim: int, offset: int, size: int) -> Box:
        """The box with another range in one dimension."""
        return Box(
            (*self.offsets[:dim], offset, *self.offsets[dim + 1 :]), (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        )


@dataclass(frozen=True)
class Part:
    """Those elements of a slice that are one box of the full tensor.

    Args:
        start: Where, in the slice's flat elements, a rectangle of shape `shape` begins.
        inside: The part as a box of that rectangle.
        box: The part as a box of the full tensor.
        shape: Shape of the rectangle.
    """

    start: int
    inside: Box
    box: Box
    shape: tuple[int, ...]

    def of(self, flat: Any) -> Any:
        """A view of the part's elements.

        Args:
            flat: One-dimensional tensor of the slice's elements.
        """
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)[self.inside.index]


def _met(box: Box, dim: int, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Where a box of the local tensor meets ranges of the full one: first index in the box, in the full one, length."""
    first, last = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    at = 0
    for start, stop in ranges:
        begin, end = max(first, at), min(last, at + stop - start)
        if begin < end:
            yield begin - first, start + begin - at, end - begin
        at += stop - start


def _boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that together are the flat elements `start` to `stop` of a tensor, in order."""
    if start >= stop:
        return
    if len(sizes) < 2:
        yield Box((start,) * len(sizes), (stop - start,) * len(sizes))
        return
    row = prod(sizes[1:])
    head = min(-(-start // row) * row, stop)  # to the end of a row that begins before `start`
    tail = max(stop // row * row, head)  # from the beginning of a row that ends after `stop`
    for begin, end in ((start, head), (tail, stop)):
        if begin == tail and tail > head:
            yield Box((head // row, *(0,) * len(sizes[1:])), ((tail - head) // row, *sizes[1:]))
        index = begin // row
        for box in _boxes(sizes[1:], begin - index * row, end - index * row):
            yield Box((index, *box.offsets), (1, *box.sizes))


def even_flat_range(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `parts` equal flat shards; the last ones are short or empty where they pass the end."""
    size = -(-numel // parts)
    return min(index * size, numel), min((index + 1) * size, numel)


def rows_covering(shape: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """First and one-past-last index of dimension 0 whose rows hold the flat elements `start` to `stop`."""
    row = prod(shape[1:])
    return start // row, -(-stop // row)
