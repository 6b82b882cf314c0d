"""Communication of tensor parallelism: asynchronous collectives, and autograd functions over them.

Each autograd function is one of a pair whose forward is the other's backward (Shoeybi et al. 2019, figure 3: f and g;
Korthikanti et al. 2022, figure 5: g and g-bar). Outside of the sharded layers activations and gradients are the same on
all tensor-parallel ranks; between them each rank has a shard. A group of one rank communicates nothing.

Source: https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2205.05198

Legend: tp ranks of the group, B samples, T positions, t positions on a rank (T / tp, rounded up), H hidden size,
D a size that is sharded, d = D / tp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# The names changed in torch 2.13, which warns of the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Started:
    """A collective on its way.

    Args:
        work: What to wait for; None: there is nothing to wait for.
        buffer: What it writes.
        finish: Makes the result of the buffer.
    """

    def __init__(self, work: Any, buffer: torch.Tensor, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._work, self._buffer, self._finish = work, buffer, finish

    def wait(self) -> torch.Tensor:
        """The result, once it is there."""
        if self._work is not None:
            self._work.wait()
        return self._finish(self._buffer)


def start_all_reduce(
    buffer: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Started:
    """Starts to reduce a contiguous tensor in place.

    Comm: one all-reduce over `group`, the tensor's bytes.
    """
    work = None if group.size() == 1 else dist.all_reduce(buffer, op, group, async_op=True)
    return Started(work, buffer, lambda out: out)


def start_all_gather(x: torch.Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Started:
    """Starts to join the ranks' shards along a dimension, truncated to `length`.

    Shapes: (B, t, H) on each rank -> (B, T, H) for dimension 1 and length T.

    Comm: one all-gather over `group`, the bytes of the full tensor.
    """
    if group.size() == 1:
        return Started(None, x, lambda out: out.narrow(dim, 0, length))
    shards = x.new_empty((group.size(), *x.shape))
    # Flat: gloo wants a full tensor with as many dimensions as a shard.
    work = _all_gather(shards.view(-1), x.contiguous().view(-1), group=group, async_op=True)
    return Started(work, shards, lambda out: out.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, length))


def start_reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> Started:
    """Starts to sum over the ranks and keep this rank's shard of a dimension, which is padded to divide.

    Shapes: (B, T, H) -> (B, t, H) for dimension 1.

    Comm: one reduce-scatter over `group`, the bytes of the full tensor.
    """
    if group.size() == 1:
        return Started(None, x, lambda out: out)
    shards = _padded(x, dim, group).unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(shards[0])
    work = _reduce_scatter(own.view(-1), shards.view(-1), group=group, async_op=True)
    return Started(work, own, lambda out: out)


def all_reduced(
    x: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """The reduction of the ranks' tensors as a new one, without a gradient.

    Comm: one all-reduce over `group`, the tensor's bytes.
    """
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group, op).wait()


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor as it is, for use on each rank's shard of a layer: each rank computes a term of its gradient.

    Comm: backward one all-reduce over `group`, the tensor's bytes.
    """
    return x if group.size() == 1 else _Copy.apply(x, group)


def sum_gradient(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A parameter that all ranks hold and use on different shards of the activations.

    Comm: backward one all-reduce over `group`, the parameter's bytes.
    """
    return copy_to_group(parameter, group)


def reduce_from_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' partial results.

    Comm: forward one all-reduce over `group`, the tensor's bytes.
    """
    return x if group.size() == 1 else _Reduce.apply(x, group)


def gather_last_dim(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' shards joined along the last dimension.

    Shapes: (..., d) -> (..., D).

    Comm: forward one all-gather over `group`, the bytes of the full tensor.
    """
    return x if group.size() == 1 else _Gather.apply(x, x.dim() - 1, x.shape[-1] * group.size(), group)


def scatter_last_dim(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's shard of a tensor that all hold, along the last dimension, which divides.

    Shapes: (..., D) -> (..., d).

    Comm: backward one all-gather over `group`, the bytes of the full tensor.
    """
    return x if group.size() == 1 else _Scatter.apply(x, x.dim() - 1, group)


def scatter_sequence(x_BTH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's positions of a tensor that all hold; zeros where the sequence does not divide.

    Shapes: (B, T, H) -> (B, t, H).

    Comm: backward one all-gather over `group`, the bytes of the full tensor.
    """
    return x_BTH if group.size() == 1 else _Scatter.apply(x_BTH, 1, group)


def gather_sequence(x_BtH: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All positions, for use that is the same on all ranks, so that each computes the full gradient.

    Shapes: (B, t, H) -> (B, T, H).

    Comm: forward one all-gather over `group`, the bytes of the full tensor.

    Args:
        x_BtH: This rank's positions.
        length: T.
        group: The ranks.
    """
    return x_BtH if group.size() == 1 else _Gather.apply(x_BtH, 1, length, group)


def reduce_scatter_sequence(x_BTH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's positions of the sum of the ranks' partial results.

    Shapes: (B, T, H) -> (B, t, H).

    Comm: forward one reduce-scatter over `group`, backward one all-gather; the bytes of the full tensor.
    """
    return x_BTH if group.size() == 1 else _ReduceScatter.apply(x_BTH, 1, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduced(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, length, group):
        ctx.dim, ctx.group = dim, group
        return start_all_gather(x, dim, length, group).wait()

    @staticmethod
    def backward(ctx, grad):
        return _own_shard(grad, ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return _own_shard(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return start_all_gather(grad, ctx.dim, ctx.length, ctx.group).wait(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return start_reduce_scatter(x, dim, group).wait()

    @staticmethod
    def backward(ctx, grad):
        return start_all_gather(grad, ctx.dim, ctx.length, ctx.group).wait(), None, None


def _padded(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor with zeros at the end of a dimension, so that it divides."""
    missing = -x.shape[dim] % group.size()
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _own_shard(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    # A copy: a view would keep the full tensor alive.
    return _padded(x, dim, group).chunk(group.size(), dim)[group.rank()].clone()
