"""Attention modules of which each tensor-parallel rank computes some of the heads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.patching import mix_in
from ds_trainer.planning.tp_divisibility import Unit

_HEADS = ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = "num_key_value_groups"
_DIMS = re.compile(r"head_dim|head_size$")
_WIDTHS = ("embed_dim", "hidden_size", "split_size", "all_head_size", "q_dim", "kv_dim", "q_size", "kv_size")
_BIASES = ("alibi", "position_bias")


@dataclass(frozen=True)
class Heads:
    """Numbers of an attention module.

    Args:
        number: Query heads.
        kv: Key and value heads.
        dims: Sizes that a head has in queries, keys or values.
    """

    number: int
    kv: int
    dims: frozenset[int]

    @property
    def units(self) -> list[Unit]:
        """What is assigned to the tensor-parallel ranks."""
        kv = [] if self.kv == self.number else [Unit("KV heads", self.kv, repeats=True)]
        return [Unit("attention heads", self.number), *kv]

    def local(self, size: int) -> Heads:
        """Those of each of `size` ranks."""
        number, kv = (Unit("", n, repeats=True).per_rank(size) for n in (self.number, self.kv))
        return Heads(number, kv, self.dims)

    def are_kv(self, width: int) -> bool:
        """Whether a projection of this width makes keys or values only, of which there are fewer than queries."""
        return width in {self.kv * dim for dim in self.dims} - {self.number * dim for dim in self.dims}


def heads_of(module: nn.Module, config: Any) -> Heads | None:
    """The heads of an attention module, by its own attributes or else by the config; None: it is no attention module.

    What makes it one is an attribute with the size or the number of its heads.

    Args:
        module: The module that holds the projections.
        config: Config of the model, where the module has none of its own.
    """
    own = {name: value for name, value in vars(module).items() if type(value) is int}
    dims = frozenset(value for name, value in own.items() if _DIMS.search(name))
    if not dims and _first(own, (*_HEADS, *_KV_HEADS)) is None:
        return None
    config = getattr(module, "config", config)
    given = {name: value for name in (*_HEADS, *_KV_HEADS) if type(value := getattr(config, name, None)) is int}
    number = _first(own, _HEADS) or _first(given, _HEADS)
    if number is None:
        return None
    kv = _first(own, _KV_HEADS) or (number // own[_GROUPS] if _GROUPS in own else _first(given, _KV_HEADS) or number)
    if not dims:
        dims = frozenset({getattr(config, "hidden_size", number) // number})
    return Heads(number, kv, dims)


def heads_sharding(heads: Heads, shape: tuple[int, ...], dim: int, size: int) -> TensorSharding:
    """The sharding of a projection to queries, or to keys or values, between heads.

    Args:
        heads: Of the full module.
        shape: Of the projection's weight.
        dim: Its dimension of outputs.
        size: Number of tensor-parallel ranks.
    """
    if heads.are_kv(shape[dim]) and heads.kv < size:
        return TensorSharding.repeated(shape, dim, size, heads.kv)
    return TensorSharding.even(shape, dim, size)


def qkv_sharding(heads: Heads, shape: tuple[int, ...], dim: int, size: int) -> TensorSharding:
    """The sharding of a packed projection to queries, keys and values: each of the three between heads.

    Args:
        heads: Of the full module.
        shape: Of the projection's weight.
        dim: Its dimension of outputs.
        size: Number of tensor-parallel ranks.
    """
    head_dim = shape[dim] // (heads.number + 2 * heads.kv)
    queries, keys = heads.number * head_dim, heads.kv * head_dim
    parts = [
        (start, heads_sharding(Heads(heads.number, heads.kv, frozenset({head_dim})), (width,), 0, size))
        for start, width in ((0, queries), (queries, keys), (queries + keys, keys))
    ]
    ranges = tuple(
        tuple((start + first, start + last) for start, sharding in parts for first, last in sharding.ranges[rank])
        for rank in range(size)
    )
    return TensorSharding(tuple(shape), dim, ranges, sum(sharding.length for _, sharding in parts))


def localize(module: nn.Module, heads: Heads, group: dist.ProcessGroup) -> None:
    """Reduces an attention module to this rank's heads.

    Its code counts heads by integer attributes: the numbers of heads, of which the names are well known
    (`num_key_value_groups` is their ratio), and the widths made of them, recognised by name and value. Sizes of
    one head stay. Of a bias that comes from outside for all heads (ALiBi), each call takes this rank's heads.

    Args:
        module: Changed in place.
        heads: Of the full module.
        group: The tensor-parallel group.
    """
    local = heads.local(group.size())
    counts = dict.fromkeys(_HEADS, (heads.number, local.number)) | dict.fromkeys(_KV_HEADS, (heads.kv, local.kv))
    widths = {n * dim: m * dim for n, m in ((heads.kv, local.kv), (heads.number, local.number)) for dim in heads.dims}
    for name, value in list(vars(module).items()):
        if type(value) is not int:
            continue
        if name in counts and value == counts[name][0]:
            setattr(module, name, counts[name][1])
        elif name == _GROUPS:
            setattr(module, name, local.number // local.kv)
        elif name in _WIDTHS and value in widths:
            setattr(module, name, widths[value])
    mix_in(module, _LocalHeads)
    module.all_heads, module.heads_group = heads.number, group  # type: ignore[assignment]


class _LocalHeads:
    """An attention module that is given biases of all heads."""

    all_heads: int
    heads_group: dist.ProcessGroup

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _BIASES:
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = self._local_heads(kwargs[name])
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _local_heads(self, bias: torch.Tensor) -> torch.Tensor:
        """This rank's heads of a bias, whose first dimension is heads, or samples times heads."""
        by_head = bias.unflatten(0, (-1, self.all_heads))
        return by_head.chunk(self.heads_group.size(), 1)[self.heads_group.rank()].flatten(0, 1)


def _first(values: dict[str, int], names: Iterable[str]) -> int | None:
    return next((values[name] for name in names if name in values), None)
