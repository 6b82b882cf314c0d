"""What each style of a tensor-parallel plan does to a module or a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.errors import ModelError
from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.attention import heads_of, heads_sharding, qkv_sharding
from ds_trainer.parallel.tensor.embedding import make_vocab_parallel
from ds_trainer.parallel.tensor.experts import EXPERT_STYLES
from ds_trainer.parallel.tensor.grad_allreduce import sum_partial_gradients
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, column_bias_sharding
from ds_trainer.parallel.tensor.splitter import Splitter
from ds_trainer.planning.tp_divisibility import Unit
from ds_trainer.planning.tp_plan import generic

Style = Callable[[Splitter, str, nn.Module | nn.Parameter], None]


def colwise(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards the outputs; in an attention module between heads. A parameter: its rows, or its elements."""
    if isinstance(target, nn.Parameter):
        _shard_rows(splitter, name, target, 1)
        return
    heads = heads_of(splitter.parent(target), splitter.config)
    shape, dim = _weight(name, target, "colwise")
    if heads is None:
        splitter.units.append(Unit(f"outputs of {generic(name)}", shape[dim]))
        _column(splitter, target, TensorSharding.even(shape, dim, splitter.size))
        return
    splitter.units += heads.units
    _column(splitter, target, heads_sharding(heads, shape, dim, splitter.size))
    splitter.shard_heads(splitter.parent(target), heads)


def qkv_colwise(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards a packed projection to queries, keys and values, each of the three between heads."""
    shape, dim = _weight(name, target, "qkv_colwise")
    assert isinstance(target, nn.Module)
    heads = heads_of(splitter.parent(target), splitter.config)
    if heads is None:
        raise ModelError(
            f"style qkv_colwise is given to {name}, and the number of heads of its module is not known",
            "queries, keys and values are sharded between heads",
            "give it another style in parallel.tp_plan",
        )
    splitter.units += heads.units
    _column(splitter, target, qkv_sharding(heads, shape, dim, splitter.size))
    splitter.shard_heads(splitter.parent(target), heads)


def colwise_gather_output(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards the outputs, padded where they do not divide, and gathers them."""
    shape, dim = _weight(name, target, "colwise_gather_output")
    assert isinstance(target, nn.Module)
    _column(splitter, target, padded_sharding(shape, dim, splitter.size), gather_output=True)


def packed_colwise(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards the outputs of two layers packed into one, each by itself. A parameter: its rows."""
    if isinstance(target, nn.Parameter):
        _shard_rows(splitter, name, target, 2)
        return
    shape, dim = _weight(name, target, "packed_colwise")
    splitter.units.append(Unit(f"outputs in each half of {generic(name)}", shape[dim] // 2))
    _column(splitter, target, _even(shape, dim, splitter.size, 2))


def rowwise(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards the inputs, of which each rank is given its shard, and sums the outputs. A parameter: its columns."""
    if isinstance(target, nn.Parameter):
        _shard_columns(splitter, name, target, 1)
        return
    heads = heads_of(splitter.parent(target), splitter.config)
    _row(splitter, name, target, 1)
    if heads is not None:
        splitter.units += heads.units


def rowwise_split_input(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards the inputs, of which each rank is given all, and sums the outputs."""
    _row(splitter, name, target, 1).input_is_full = True


def packed_rowwise(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards the inputs of two layers packed into one. A parameter: its columns."""
    if isinstance(target, nn.Parameter):
        _shard_columns(splitter, name, target, 2)
    else:
        _row(splitter, name, target, 2)


def embedding_rowwise(splitter: Splitter, name: str, target: Any) -> None:
    """Shards an embedding's rows, padded where they do not divide, and sums the outputs."""
    if not isinstance(target, nn.Embedding):
        raise _misfit(name, target, "embedding_rowwise")
    sharding = padded_sharding(tuple(target.weight.shape), 0, splitter.size)
    weight: Any = target.weight
    make_vocab_parallel(target, sharding, splitter.group)
    target.weight = splitter.local(weight, sharding)
    for module in target.modules():
        if module is not target and list(module.parameters(recurse=False)):
            sum_partial_gradients(module, splitter.group)  # It sees the tokens that this rank has.


def replicated_with_grad_allreduce(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Leaves a module unsharded that is used on this rank's shard of the activations: its gradients are summed."""
    if not isinstance(target, nn.Module):
        raise _misfit(name, target, "replicated_with_grad_allreduce")
    sum_partial_gradients(target, splitter.group)


def stays(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Leaves a module as it is: unsharded, or with parameters of which each has its own style."""


STYLES: dict[str, Style] = {
    "colwise": colwise,
    "colwise_gather_output": colwise_gather_output,
    "embedding_rowwise": embedding_rowwise,
    "local_params": stays,
    "packed_colwise": packed_colwise,
    "packed_rowwise": packed_rowwise,
    "qkv_colwise": qkv_colwise,
    "replicate": stays,
    "replicated_with_grad_allreduce": replicated_with_grad_allreduce,
    "rowwise": rowwise,
    "rowwise_split_input": rowwise_split_input,
    **EXPERT_STYLES,
}
"""Name of a style -> the function that applies it to the module or parameter of a name."""


def padded_sharding(shape: tuple[int, ...], dim: int, size: int) -> TensorSharding:
    """Equal shards for `size` ranks along a dimension, the last ones padded."""
    along = TensorSharding.padded((shape[dim],), size)
    return TensorSharding(shape, dim, along.ranges, along.length)


def _weight(name: str, target: object, style: str) -> tuple[tuple[int, ...], int]:
    """Shape of a linear layer's weight, and its dimension of outputs."""
    if not isinstance(target, nn.Linear | Conv1D) or target._parameters.keys() > {"weight", "bias"}:
        raise _misfit(name, target, style)
    return tuple(target.weight.shape), int(isinstance(target, Conv1D))


def _column(splitter: Splitter, module: nn.Module, sharding: TensorSharding, gather_output: bool = False) -> None:
    layer = ColumnParallelLinear.from_module(module, sharding, splitter.group)
    layer.gather_output = gather_output
    splitter.swap(module, layer, {"weight": sharding, "bias": column_bias_sharding(sharding)})


def _row(splitter: Splitter, name: str, target: nn.Module | nn.Parameter, packed: int) -> RowParallelLinear:
    shape, outputs = _weight(name, target, "rowwise")
    assert isinstance(target, nn.Module)
    dim = 1 - outputs
    splitter.units.append(Unit(f"inputs of {generic(name)}", shape[dim] // packed))
    sharding = _even(shape, dim, splitter.size, packed)
    layer = RowParallelLinear.from_module(target, sharding, splitter.group)
    splitter.swap(target, layer, {"weight": sharding})
    return layer


def _shard_rows(splitter: Splitter, name: str, parameter: nn.Parameter, packed: int) -> None:
    dim = max(parameter.dim() - 2, 0)
    splitter.units.append(Unit(f"rows of {generic(name)}", parameter.shape[dim] // packed))
    _shard(splitter, name, _even(tuple(parameter.shape), dim, splitter.size, packed))


def _shard_columns(splitter: Splitter, name: str, parameter: nn.Parameter, packed: int) -> None:
    if parameter.dim() == 1:
        return  # A bias of summed outputs.
    dim = parameter.dim() - 1
    splitter.units.append(Unit(f"columns of {generic(name)}", parameter.shape[dim] // packed))
    _shard(splitter, name, _even(tuple(parameter.shape), dim, splitter.size, packed))


def _shard(splitter: Splitter, name: str, sharding: TensorSharding) -> None:
    module, _, attribute = name.rpartition(".")
    splitter.shard_parameter(splitter.model.get_submodule(module), attribute, sharding)


def _even(shape: tuple[int, ...], dim: int, size: int, packed: int) -> TensorSharding:
    return TensorSharding.even(shape, dim, size, (shape[dim] // packed,) * packed)


def _misfit(name: str, target: object, style: str) -> ModelError:
    return ModelError(
        f"style {style} is given to {name}, which is a {type(target).__name__}",
        "each style fits some kinds of layers, such as Linear and Conv1D, or Embedding",
        "give it another style in parallel.tp_plan, or `replicate`",
    )
