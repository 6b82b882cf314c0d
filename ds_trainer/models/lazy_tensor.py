"""Tensors of a checkpoint that are read when and as far as they are needed.

The conversions of transformers run on lazy tensors as on others and are recorded. Reading a slice of the result then
reads only those rows and columns of its sources that the slice is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_trainer.layout import TensorSlice
from ds_trainer.torch_internals import is_mutable, make_wrapper, tree_flatten, tree_map

Fill = Callable[[torch.Tensor, TensorSlice], object]
"""Reads a slice of a tensor into another tensor of that slice's sizes."""


class NotRecordedError(Exception):
    """An operation cannot be recorded: it writes into a tensor, or uses values other than of lazy tensors."""


class LazyTensor(torch.Tensor):
    """A tensor with a shape, a dtype and a function that reads any slice of it.

    Args:
        shape: Full shape.
        dtype: Dtype of the values.
        fill: Reads a slice.
        sliceable: False where reading any slice reads the full tensor.
    """

    sliceable: bool

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, sliceable: bool = True) -> LazyTensor:  # noqa: D102
        return make_wrapper(cls, shape, dtype, torch.device("meta"))

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, sliceable: bool = True) -> None:
        self.fill, self.sliceable = fill, sliceable

    def read_slice(self, wanted: TensorSlice) -> torch.Tensor:
        """The values of a slice, in host memory."""
        out = torch.empty(wanted.sizes, dtype=self.dtype)
        self.fill(out, wanted)
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Records an operation; one that does more than rearrange operands is computed on their full values when read.

        Raises:
            NotRecordedError: It writes into a tensor, or has operands that are not lazy.
        """
        kwargs = kwargs or {}
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        operands = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
        if is_mutable(func) or len(operands) < len(tensors):
            raise NotRecordedError(str(func))
        made = func(*tree_map(_shape_only, args), **tree_map(_shape_only, kwargs))
        rearranged = _REARRANGEMENTS.get(func)
        several = isinstance(made, list | tuple)
        results = list(made) if several else [made]
        if rearranged is not None:
            fills, sliceable = rearranged(*args, **kwargs), all(operand.sliceable for operand in operands)
        else:
            fills, sliceable = (
                [_compute_when_read(func, args, kwargs, i if several else None) for i in range(len(results))],
                False,
            )
        lazy = [cls(tuple(t.shape), t.dtype, fill, sliceable) for t, fill in zip(results, fills, strict=True)]
        return lazy if several else lazy[0]


def _shape_only(item: Any) -> Any:
    return torch.empty(item.shape, dtype=item.dtype, device="meta") if isinstance(item, LazyTensor) else item


def _values(item: Any) -> Any:
    return item.read_slice(TensorSlice.whole(item.shape)) if isinstance(item, LazyTensor) else item


def _compute_when_read(func: Any, args: Any, kwargs: Any, number: int | None) -> Fill:
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
    """Reads slices of the narrowed tensor that starts at `begin` along `dim`."""

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
"""Operation of torch -> function that gives a `Fill` for each of its results."""
