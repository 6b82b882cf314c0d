"""Column layers that read the same tensor are computed together, as one node of the autograd graph.

So their input gradients are summed once, and communication overlaps with computing.

Legend: B samples, T positions, t positions on a rank, H size of the input, D a layer's outputs on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ds_trainer.parallel.deferred_weight_grads import gradient_or_defer, is_deferring
from ds_trainer.parallel.tensor.collectives import Started, start_all_gather, start_all_reduce, start_reduce_scatter
from ds_trainer.parallel.tensor.replicated_shards import ReplicatedShards
from ds_trainer.torch_internals import in_backward


class ColumnLayer(Protocol):
    """What a group reads of its members, see `ds_trainer.parallel.tensor.linear.ColumnParallelLinear`."""

    column_group: ColumnGroup
    transposed: bool
    weight_replicas: ReplicatedShards | None
    bias_replicas: ReplicatedShards | None

    @property
    def weight(self) -> torch.Tensor:
        """(D, H), or (H, D) where it is transposed."""

    @property
    def bias(self) -> torch.Tensor:
        """(D,); None: there is none."""


class ColumnGroup:
    """Column layers that are called one after the other with one tensor, such as q, k and v, or gate and up.

    The first one called computes the outputs of all and keeps those of the others until these are called. A layer that
    is then called with another tensor, or not at all, is a group of its own from the next forward pass on: right from
    the first call, at the cost of one output that nobody uses. Not at once: activations that are recomputed in the
    backward pass must be computed as they were.

    Args:
        members: The layers, of equal `in_features`; each gets this group as its `column_group`.
        group: The tensor-parallel group.

    Attributes:
        keep_gathered_input: Whether an input gathered from the ranks' positions is kept for the backward pass.
    """

    def __init__(self, members: Iterable[ColumnLayer], group: dist.ProcessGroup) -> None:
        self.members = list(members)
        self.keep_gathered_input = False
        self._group = group
        self._input: torch.Tensor | None = None
        self._outputs: dict[ColumnLayer, torch.Tensor] = {}
        self._kept_in_backward = False
        self._leaving: set[ColumnLayer] = set()
        for member in self.members:
            member.column_group = self

    def output(self, member: ColumnLayer, x: torch.Tensor) -> torch.Tensor:
        """A member's output for a tensor, see `column_outputs`."""
        if member not in self._outputs:
            if not in_backward():
                self._release_unused()
            if member.column_group is not self:
                return member.column_group.output(member, x)
            outputs = column_outputs(x, self.members, self._group, self.keep_gathered_input)
            self._input, self._outputs = x, dict(zip(self.members, outputs, strict=True))
            self._kept_in_backward = in_backward()
        output = self._outputs.pop(member)
        if x is not self._input:
            self._leaving.add(member)
            (output,) = column_outputs(x, [member], self._group, self.keep_gathered_input)
        if not self._outputs:
            self._input = None
        return output

    def _release_unused(self) -> None:
        """Puts each layer that was not called with the others into a group of its own."""
        if not self._kept_in_backward:  # There, recomputation stops as soon as it has what it needs.
            self._leaving |= self._outputs.keys()
        for member in self._leaving:
            self.members.remove(member)
            ColumnGroup([member], self._group).keep_gathered_input = self.keep_gathered_input
        self._leaving.clear()


def column_outputs(
    x_BTH: torch.Tensor, layers: Sequence[ColumnLayer], group: dist.ProcessGroup, keep_gathered_input: bool
) -> tuple[torch.Tensor, ...]:
    """Each layer's output.

    A tensor that was gathered from the ranks' positions (B, t, H) has them as its attribute `sequence_shard`. Its
    gradient goes there directly, by a reduce-scatter: through the gather it would have to be summed on every rank
    first.

    Shapes: (B, T, H) -> (B, T, D) for each layer.

    Comm: backward one all-reduce over `group`, the bytes of the input. Of a gathered input: backward one
    reduce-scatter, and unless it was kept one all-gather before it, each the bytes of the gathered input.

    Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2: "we only store the Y_i^s part
    on the i-th tensor parallel rank and perform an extra all-gather in the backward pass".

    Args:
        x_BTH: What all layers read.
        layers: The layers.
        group: The tensor-parallel group.
        keep_gathered_input: Whether a gathered input is kept for the backward pass.
    """
    shard_BtH = getattr(x_BTH, "sequence_shard", None)
    gathered = None if shard_BtH is None else x_BTH.detach()
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    tensors = _as_autocast(x_BTH if shard_BtH is None else shard_BtH, gathered, *parameters)
    return _Columns.apply(layers, group, keep_gathered_input, *tensors)


def _as_autocast(x: torch.Tensor, *others: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in autocast's dtype, where it is on: autocast does not reach into an autograd function."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in (x, *others)]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, group, keep_gathered_input, x, gathered, *parameters):
        ctx.layers, ctx.group = tuple(layers), group
        ctx.length = None if gathered is None else gathered.shape[1]
        ctx.gathers_again = gathered is not None and not keep_gathered_input
        ctx.set_materialize_grads(False)
        read = x if gathered is None else gathered
        ctx.save_for_backward(x if ctx.gathers_again else read, *parameters[::2])
        weights = _rows_per_output(layers, parameters[::2])
        return tuple(F.linear(read, weight, bias) for weight, bias in zip(weights, parameters[1::2], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        read, *weights = ctx.saved_tensors
        _, _, _, needs_input, _, *needs_parameter = ctx.needs_input_grad
        read = _SavedInput(read, ctx.length if ctx.gathers_again else None, ctx.group)
        # What is started first is on its way while the input's gradient is computed, that while the weights' are.
        reducing = None
        if any(needs_parameter[::2]) and not is_deferring():
            read.start()
        if needs_input:
            reducing = _start_sum(_partial(grads, _rows_per_output(ctx.layers, weights)), ctx.length, ctx.group)
        of_parameters: list[torch.Tensor | None] = []
        for i, (layer, grad) in enumerate(zip(ctx.layers, grads, strict=True)):
            needs_weight, needs_bias = needs_parameter[2 * i : 2 * i + 2]
            of_parameters += _of_layer(layer, grad, read, needs_weight, needs_bias, ctx.group)
        return None, None, None, None if reducing is None else reducing.wait(), None, *of_parameters


def _rows_per_output(layers: Sequence[ColumnLayer], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.t() if layer.transposed else weight for layer, weight in zip(layers, weights, strict=True)]


def _partial(grads: Sequence[torch.Tensor | None], weights_DH: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's term of the input's gradient."""
    used = [(grad, weight) for grad, weight in zip(grads, weights_DH, strict=True) if grad is not None]
    (grad, weight), *others = used
    total = grad.flatten(0, -2) @ weight
    for other, weight in others:
        total.addmm_(other.flatten(0, -2), weight)
    return total.unflatten(0, grad.shape[:-1])


def _start_sum(partial_BTH: torch.Tensor, length: int | None, group: dist.ProcessGroup) -> Started:
    """Starts to sum the ranks' terms; `length` is None where the input was not gathered from their positions."""
    if length is None:
        return start_all_reduce(partial_BTH, group)
    return start_reduce_scatter(partial_BTH, 1, group)


class _SavedInput:
    """The input that the layers have read, for the gradients of their weights.

    Args:
        kept: All positions, or this rank's.
        length: Number of all positions, which are to be gathered again; None: `kept` has all.
        group: The tensor-parallel group.
    """

    def __init__(self, kept: torch.Tensor, length: int | None, group: dist.ProcessGroup) -> None:
        self._kept, self._length, self._group = kept, length, group
        self._gathering: Started | None = None

    def start(self) -> None:
        """Starts the gather, where there is one to do."""
        if self._length is not None:
            self._gathering = start_all_gather(self._kept, 1, self._length, self._group)
            self._length = None

    def wait(self) -> torch.Tensor:
        """All positions; gathered once, whichever layer needs them first."""
        self.start()
        if self._gathering is not None:
            self._kept, self._gathering = self._gathering.wait(), None
        return self._kept


def _of_layer(
    layer: ColumnLayer,
    grad_BTD: torch.Tensor | None,
    read: _SavedInput,
    needs_weight: bool,
    needs_bias: bool,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a layer's weight and bias; None where none is needed, or it is deferred."""
    if grad_BTD is None:
        return None, None
    grad_ND = grad_BTD.flatten(0, -2)
    weight = gradient_or_defer(layer.weight, partial(_of_weight, layer, grad_ND, read, group)) if needs_weight else None
    bias = gradient_or_defer(layer.bias, partial(_of_bias, layer, grad_ND, group)) if needs_bias else None
    return weight, bias


def _of_weight(layer: ColumnLayer, grad_ND: torch.Tensor, read: _SavedInput, group: dist.ProcessGroup) -> torch.Tensor:
    x_NH = read.wait().flatten(0, -2)
    of_weight = x_NH.t() @ grad_ND if layer.transposed else grad_ND.t() @ x_NH
    return of_weight if layer.weight_replicas is None else layer.weight_replicas.sum(of_weight, group)


def _of_bias(layer: ColumnLayer, grad_ND: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    of_bias = grad_ND.sum(0)
    return of_bias if layer.bias_replicas is None else layer.bias_replicas.sum(of_bias, group)
