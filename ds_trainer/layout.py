"""Which slice of which full tensor a rank owns: the terms of loading, saving, resharding and export. Pure.

Names are the Hugging Face parameter names of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any


@dataclass(frozen=True)
class TensorSharding:
    """How tensor parallelism shards one parameter along one dimension: each rank holds some index ranges of it.

    A rank holds several ranges of a packed parameter, of which each packed matrix is sharded by itself. Several ranks
    hold the same range where KV heads are fewer than the ranks. The last ranks hold padding where a vocabulary does not
    divide.

    Example:
        Gate and up projection packed in 8 rows, on 2 ranks:
        `TensorSharding((8, 4), 0, (((0, 2), (4, 6)), ((2, 4), (6, 8))), 4)`.

    Args:
        shape: Shape of the full tensor.
        dim: Dimension that is sharded.
        ranges: For each rank the ranges (start, stop) of that dimension that it holds, in the order it holds them.
        length: Size of that dimension on a rank, the same on all; padding at the end fills what the ranges leave open.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    length: int

    @classmethod
    def even(cls, shape: tuple[int, ...], dim: int, size: int, parts: tuple[int, ...] | None = None) -> TensorSharding:
        """Equal ranges for `size` ranks, of each packed matrix by itself.

        Args:
            shape: Shape of the full tensor.
            dim: Dimension to shard, from 0.
            size: Number of ranks; divides every one of `parts`.
            parts: Lengths of the matrices that are packed along the dimension; None: there is one.
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
    def padded(cls, shape: tuple[int, ...], size: int) -> TensorSharding:
        """Equal numbers of rows for `size` ranks, the last ones padded."""
        ranges = tuple((even_flat_range(shape[0], size, rank),) for rank in range(size))
        return cls(tuple(shape), 0, ranges, -(-shape[0] // size))

    @classmethod
    def repeated(cls, shape: tuple[int, ...], dim: int, size: int, units: int) -> TensorSharding:
        """One of `units` equal units for each of `size` ranks, `size / units` neighbouring ranks holding the same one.

        Args:
            shape: Shape of the full tensor.
            dim: Dimension to shard.
            size: Number of ranks, a multiple of `units`.
            units: Such as KV heads.
        """
        n, replicas = shape[dim] // units, size // units
        ranges = tuple(((rank // replicas * n, (rank // replicas + 1) * n),) for rank in range(size))
        return cls(tuple(shape), dim, ranges, n)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the parameter on a rank, padding included."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def first_holder(self, rank: int) -> int:
        """The first of the ranks that hold the same shard as `rank`."""
        return self.ranges.index(self.ranges[rank])

    def first_held(self, rank: int) -> list[tuple[int, int]]:
        """Ranges of the rank's local dimension that no lower rank holds too, without padding."""
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
    """What one rank owns of one parameter: a range of the flattened elements of its tensor-parallel shard.

    Example:
        ZeRO on 2 ranks shards a (3, 4) matrix flat: rank 0 owns `ParameterSlice("w", (3, 4), (0, 6))`.

    Args:
        name: Hugging Face parameter name.
        shape: Shape of the full tensor.
        flat: Start and stop in the row-major flattened local tensor.
        sharding: How tensor parallelism shards the full tensor; None: not at all, the local tensor is the full one.
        rank: Tensor-parallel rank, which selects the ranges of `sharding`.
    """

    name: str
    shape: tuple[int, ...]
    flat: tuple[int, int]
    sharding: TensorSharding | None = None
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

    def parts(self) -> Iterator[SlicePart]:
        """The same elements as rectangular slices of the full tensor, without padding.

        A flat range rarely begins and ends with a row: in n dimensions it takes up to 2n - 1 slices of the local
        tensor. Each of them takes as many slices of the full tensor as it meets ranges of the sharding.

        Example:
            Elements 2 to 9 of a (3, 4) matrix: the end of row 0, row 1, the first element of row 2.
        """
        local_shape = self.shape if self.sharding is None else self.sharding.local_shape
        start = 0
        for local in _slices(local_shape, *self.flat):
            inner = TensorSlice.whole(local.sizes)
            if self.sharding is None:
                yield SlicePart(start, inner, local, local.sizes)
            else:
                dim, ranges = self.sharding.dim, self.sharding.ranges[self.rank]
                for at, first, length in _overlaps(local, dim, ranges):
                    yield SlicePart(start, inner.along(dim, at, length), local.along(dim, first, length), local.sizes)
            start += local.numel


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular index range of a tensor.

    Args:
        offsets: First index in each dimension.
        sizes: Length in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
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

    def along(self, dim: int, offset: int, size: int) -> TensorSlice:
        """The slice with another range in one dimension."""
        return TensorSlice(
            (*self.offsets[:dim], offset, *self.offsets[dim + 1 :]), (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        )


@dataclass(frozen=True)
class SlicePart:
    """Those elements of a `ParameterSlice` that are one rectangular slice of the full tensor.

    Args:
        start: Where, in the flat elements of the `ParameterSlice`, a rectangle of shape `shape` begins.
        inner: The part as a slice of that rectangle.
        slice: The part as a slice of the full tensor.
        shape: Shape of the rectangle.
    """

    start: int
    inner: TensorSlice
    slice: TensorSlice
    shape: tuple[int, ...]

    def of(self, flat: Any) -> Any:
        """A view of the part's elements.

        Args:
            flat: One-dimensional tensor of the elements of the `ParameterSlice`.
        """
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)[self.inner.index]


def _overlaps(local: TensorSlice, dim: int, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Where a slice of the local tensor meets ranges of the full one: first index in both, length."""
    first, last = local.offsets[dim], local.offsets[dim] + local.sizes[dim]
    at = 0
    for start, stop in ranges:
        begin, end = max(first, at), min(last, at + stop - start)
        if begin < end:
            yield begin - first, start + begin - at, end - begin
        at += stop - start


def _slices(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorSlice]:
    """Rectangular slices that together are the flat elements `start` to `stop` of a tensor, in order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield TensorSlice((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])
    head = min(-(-start // row) * row, stop)  # to the end of a row that begins before `start`
    tail = max(stop // row * row, head)  # from the beginning of a row that ends after `stop`
    for begin, end in ((start, head), (tail, stop)):
        if begin == tail and tail > head:
            yield TensorSlice((head // row, *(0,) * len(shape[1:])), ((tail - head) // row, *shape[1:]))
        index = begin // row
        for inner in _slices(shape[1:], begin - index * row, end - index * row):
            yield TensorSlice((index, *inner.offsets), (1, *inner.sizes))


def even_flat_range(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `parts` equal flat shards; the last ones are short or empty where they pass the end."""
    size = -(-numel // parts)
    return min(index * size, numel), min((index + 1) * size, numel)


def rows_covering(shape: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """First and one-past-last index of dimension 0 whose rows hold the flat elements `start` to `stop`."""
    row = prod(shape[1:])
    return start // row, -(-stop // row)
