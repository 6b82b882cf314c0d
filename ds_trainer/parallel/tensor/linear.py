"""Linear layers sharded over the tensor-parallel ranks: by outputs (column), or by inputs (row).

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.

Legend: B samples, T positions, t positions on a rank, I inputs, D outputs, i and d those on a rank.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.collectives import (
    gather_last_dim,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_last_dim,
    sum_gradient,
)
from ds_trainer.parallel.tensor.column_linear_group import ColumnGroup
from ds_trainer.parallel.tensor.replicated_shards import ReplicatedShards


def column_bias_sharding(sharding: TensorSharding) -> TensorSharding:
    """The sharding of a column layer's bias, given that of its weight."""
    return TensorSharding((sharding.shape[sharding.dim],), 0, sharding.ranges, sharding.length)


class ParallelLinear(nn.Linear):
    """A rank's shard of a linear layer; `in_features` and `out_features` are the rank's.

    Attributes:
        sharding: Of the weight.
        group: The tensor-parallel group.
        transposed: Whether the weight is (I, D), as in GPT-2's `Conv1D`, not (D, I).
    """

    sharding: TensorSharding
    group: dist.ProcessGroup
    transposed: bool

    @classmethod
    def _shard_of(cls, module: nn.Module, sharding: TensorSharding, group: dist.ProcessGroup, transposed: bool) -> Self:
        """This rank's shard of a module, its weight on meta; no bias yet."""
        inputs, outputs = sharding.local_shape if transposed else reversed(sharding.local_shape)
        layer = cls(inputs, outputs, bias=False, device="meta")
        weight = _like(module.weight, sharding.local_shape)
        assert weight is not None
        layer.weight = weight
        layer.sharding, layer.group, layer.transposed = sharding, group, transposed
        return layer.train(module.training)


class ColumnParallelLinear(ParallelLinear):
    """This rank's outputs, from an input that all ranks have; made by `from_module`.

    Shapes: (..., I) on all ranks -> (..., d) on each, or (..., D) on all with `gather_output`.

    Comm: as `column_outputs`; with `gather_output`, forward one all-gather of the bytes of the full output.

    Attributes:
        gather_output: Whether the ranks' outputs are joined: in the order of the full layer's, without padding.
        column_group: Layers that are computed together with this one.
        weight_replicas: What other ranks hold too of the weight; None: nothing.
        bias_replicas: What other ranks hold too of the bias; None: nothing.
    """

    gather_output: bool
    column_group: ColumnGroup
    weight_replicas: ReplicatedShards | None
    bias_replicas: ReplicatedShards | None

    @classmethod
    def from_module(cls, module: nn.Module, sharding: TensorSharding, group: dist.ProcessGroup) -> Self:
        """This rank's shard of a module, with parameters on meta.

        Args:
            module: An `nn.Linear`, or a `Conv1D`, whose weight is the other way round.
            sharding: How its weight is sharded; its bias is sharded alike.
            group: The tensor-parallel group.
        """
        layer = cls._shard_of(module, sharding, group, transposed=sharding.dim == 1)
        bias_sharding = column_bias_sharding(sharding)
        layer.register_parameter("bias", _like(module.bias, bias_sharding.local_shape))
        layer.gather_output = False
        layer.weight_replicas, layer.bias_replicas = (
            ReplicatedShards.of(c, group.rank()) for c in (sharding, bias_sharding)
        )
        ColumnGroup([layer], group)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank, or of all."""
        y = self.column_group.output(self, x)
        if not self.gather_output:
            return y
        y = _in_order(gather_last_dim(y, self.group), self.sharding)
        return y.contiguous()  # As the model's code may expect it.


class RowParallelLinear(ParallelLinear):
    """The full output, from this rank's inputs; made by `from_module`. Its bias is not sharded.

    Shapes: (..., i) on each rank, or (..., I) on all with `input_is_full` -> (..., D) on all; with
    `sequence_parallel` (B, T, i) -> (B, t, D).

    Comm: forward one all-reduce over `group` of the output's bytes; with `sequence_parallel` one reduce-scatter of
    them, backward one all-gather, and one all-reduce of the bias's gradient; with `input_is_full` backward one
    all-gather of the bytes of the full input.

    Attributes:
        input_is_full: Whether all ranks have the full input, so that each takes its shard.
        sequence_parallel: Whether each rank is given its positions of the output, not all.
    """

    input_is_full: bool
    sequence_parallel: bool

    @classmethod
    def from_module(cls, module: nn.Module, sharding: TensorSharding, group: dist.ProcessGroup) -> Self:
        """This rank's shard of a module, with parameters on meta.

        Args:
            module: An `nn.Linear`, or a `Conv1D`, whose weight is the other way round.
            sharding: Of its weight.
            group: The tensor-parallel group.
        """
        layer = cls._shard_of(module, sharding, group, transposed=sharding.dim == 0)
        layer.register_parameter("bias", _like(module.bias))
        layer.input_is_full = layer.sequence_parallel = False
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, or this rank's positions of it."""
        if self.input_is_full:
            x = scatter_last_dim(_by_rank(x, self.sharding), self.group)
        y = (reduce_scatter_sequence if self.sequence_parallel else reduce_from_group)(self.partial(x), self.group)
        if self.bias is None:
            return y
        bias = sum_gradient(self.bias, self.group) if self.sequence_parallel else self.bias
        # Added once, after the sum. Under autocast the sum has its dtype, the bias has not.
        return y + bias.to(y.dtype)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over the ranks."""
        return F.linear(x, self.weight.t() if self.transposed else self.weight)


def _like(parameter: object, shape: tuple[int, ...] | None = None) -> nn.Parameter | None:
    """A parameter on meta, of another shape where one is given; None where there is none."""
    if not isinstance(parameter, nn.Parameter):
        return None
    return nn.Parameter(parameter.new_empty(shape or parameter.shape, device="meta"), parameter.requires_grad)


def _in_order(joined: torch.Tensor, sharding: TensorSharding) -> torch.Tensor:
    """The last dimension, joined from the ranks' shards, in the order of the full tensor; of replicas the first."""
    pieces: dict[int, tuple[int, int]] = {}
    for rank, ranges in enumerate(sharding.ranges):
        at = rank * sharding.length
        for start, stop in ranges:
            if start < stop:
                pieces.setdefault(start, (at, stop - start))
            at += stop - start
    return _picked(joined, [pieces[start] for start in sorted(pieces)])


def _by_rank(full: torch.Tensor, sharding: TensorSharding) -> torch.Tensor:
    """The last dimension in the order in which the ranks hold it."""
    return _picked(full, [(start, stop - start) for ranges in sharding.ranges for start, stop in ranges])


def _picked(x: torch.Tensor, pieces: list[tuple[int, int]]) -> torch.Tensor:
    """Pieces of the last dimension, given by start and length, side by side; neighbours cost nothing."""
    runs: list[tuple[int, int]] = []
    for start, length in pieces:
        if runs and sum(runs[-1]) == start:
            runs[-1] = runs[-1][0], runs[-1][1] + length
        else:
            runs.append((start, length))
    parts = [x.narrow(-1, start, length) for start, length in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
