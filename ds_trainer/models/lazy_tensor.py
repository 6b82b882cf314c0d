"""Tensors of a checkpoint that are not read yet.

transformers' conversions run on them as on any others. What they do is recorded, so that of the tensor that they make
one box can be read: of each source only the rows and columns that go into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ds_trainer.layout import TensorSlice

Fill = Callable[[torch.Tensor, TensorSlice], object]
"""Writes a box of a tensor into another tensor of the box's sizes."""


class NotRecordedError(Exception):
    """An operation that writes into a tensor or mixes in values from elsewhere."""


class LazyTensor(torch.Tensor):
    """A tensor with a shape, and a way to read any box of it.

    Args:
        shape: Its shape.
        dtype: Its format.
        fill: Reads a box of it.
        sliceable: False where reading any box reads the whole tensor.
    """

    sliceable: bool

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, sliceable: bool = True) -> LazyTensor:  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("meta"))

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, sliceable: bool = True) -> None:
        self.fill, self.sliceable = fill, sliceable

    def read_slice(self, wanted: TensorSlice) -> torch.Tensor:
        """The values of a box."""
        out = torch.empty(wanted.sizes, dtype=self.dtype)
        self.fill(out, wanted)
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Records an operation; one whose result is no rearrangement of its operands is redone on their whole values.

        Raises:
            NotRecordedError: It would have an effect, or depend on values that are not among its operands.
        """
        kwargs = kwargs or {}
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        operands = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
        if func._schema.is_mutable or len(operands) < len(tensors):
            raise NotRecordedError(str(func))
        made = func(*tree_map(_shape_only, args), **tree_map(_shape_only, kwargs))
        rearranged = _REARRANGEMENTS.get(func)
        several = isinstance(made, list | tuple)
        results = list(made) if several else [made]
        if rearranged is not None:
            fills, sliceable = rearranged(*args, **kwargs), all(operand.sliceable for operand in operands)
        else:
            fills, sliceable = [_redo(func, args, kwargs, i if several else None) for i in range(len(results))], False
        unread = [cls(tuple(t.shape), t.dtype, fill, sliceable) for t, fill in zip(results, fills, strict=True)]
        return unread if several else unread[0]


def _shape_only(item: Any) -> Any:
    return torch.empty(item.shape, dtype=item.dtype, device="meta") if isinstance(item, LazyTensor) else item


def _values(item: Any) -> Any:
    return item.read_slice(TensorSlice.whole(item.shape)) if isinstance(item, LazyTensor) else item


def _redo(func: Any, args: Any, kwargs: Any, number: int | None) -> Fill:
    def fill(out: torch.Tensor, wanted: TensorSlice) -> None:
        made = func(*tree_map(_values, args), **tree_map(_values, kwargs))
        out.copy_((made if number is None else made[number])[wanted.index])

    return fill


def _stack(tensors: list[LazyTensor], dim: int = 0) -> list[Fill]:
    dim %= tensors[0].dim() + 1

    def fill(out: torch.Tensor, wanted: TensorSlice) -> None:
        inner = TensorSlice(
            wanted.offsets[:dim] + wanted.offsets[dim + 1 :],
            wanted.sizes[:dim] + wanted.sizes[dim + 1 :],
        )
        for i in range(wanted.sizes[dim]):
            tensors[wanted.offsets[dim] + i].fill(out.select(dim, i), inner)

    return [fill]


def _concatenate(tensors: list[LazyTensor], dim: int = 0) -> list[Fill]:
    dim %= tensors[0].dim()

    def fill(out: torch.Tensor, wanted: TensorSlice) -> None:
        first, last, begin = wanted.offsets[dim], wanted.offsets[dim] + wanted.sizes[dim], 0
        for tensor in tensors:
            end = begin + tensor.shape[dim]
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                tensor.fill(
                    out.narrow(dim, start - first, stop - start), wanted.along(dim, start - begin, stop - start)
                )
            begin = end

    return [fill]


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> list[Fill]:
    def swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
        out = list(sizes)
        out[dim0], out[dim1] = out[dim1], out[dim0]
        return tuple(out)

    def fill(out: torch.Tensor, wanted: TensorSlice) -> None:
        tensor.fill(out.transpose(dim0, dim1), TensorSlice(swapped(wanted.offsets), swapped(wanted.sizes)))

    return [fill]


def _from(tensor: LazyTensor, dim: int, begin: int) -> Fill:
    """What lies along `dim` from `begin` on."""

    def fill(out: torch.Tensor, wanted: TensorSlice) -> None:
        tensor.fill(out, wanted.along(dim, begin + wanted.offsets[dim], wanted.sizes[dim]))

    return fill


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> list[Fill]:
    return [_from(tensor, dim % tensor.dim(), begin) for begin in range(0, tensor.shape[dim], size)]


def _split_with_sizes(tensor: LazyTensor, sizes: list[int], dim: int = 0) -> list[Fill]:
    return [_from(tensor, dim % tensor.dim(), sum(sizes[:i])) for i in range(len(sizes))]


_aten = torch.ops.aten
_REARRANGEMENTS: dict[Any, Callable[..., list[Fill]]] = {
    _aten.stack.default: _stack,
    _aten.cat.default: _concatenate,
    _aten.transpose.int: _transpose,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
}
"""torch's operations -> the reading of a box of each of their results."""
