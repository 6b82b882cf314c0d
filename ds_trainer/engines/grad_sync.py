"""Gradients of a step that no wrapper of the model reduces in its backward: reduced over the ranks at once, after it.

So are they under a pipeline, whose stages hold replicas of tied parameters, too, which no optimizer of theirs knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.torch_internals import copy_all, flatten_tensors, take_tensors, unflatten_tensors


def average_over_ranks(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, sent_as: torch.dtype | None = None
) -> None:
    """Makes gradients their means over the ranks of a group, in place.

    Args:
        gradients: The same on every rank, in the same order.
        group: The data-parallel ranks, over the device's backend.
        bucket_bytes: Gradients are sent in flat buckets of about this size.
        sent_as: Dtype in which they are sent and summed; None: their own.

    Comm: one all-reduce per bucket over `group`; none where it has one rank.
    """
    if group.size() == 1:
        return
    for bucket in take_tensors(gradients, bucket_bytes):
        flat = flatten_tensors(bucket).to(sent_as or bucket[0].dtype)
        flat /= group.size()  # First: a sum in fp16 could overflow.
        dist.all_reduce(flat, group=group)
        copy_all(bucket, unflatten_tensors(flat, bucket))


def fill_where_others_have(parameters: Sequence[nn.Parameter], host_group: dist.ProcessGroup) -> None:
    """Gives parameters without a gradient one of zeros where another rank has one.

    Args:
        parameters: The same on every rank, in the same order.
        host_group: The data-parallel ranks, over gloo.

    Comm: one all-reduce of a byte per parameter.
    """
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=host_group)
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class ReplicaGradients:
    """Sums the gradients of tied parameters' replicas over the micro-batches, in the dtype of their owner's optimizer.

    Args:
        replicas: Parameters by name that another pipeline stage owns.
        dtype: Dtype of the sums.
    """

    def __init__(self, replicas: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: dict[str, torch.Tensor] = {}
        for name, parameter in replicas.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # In a pass that defers the gradients of weights.
            return
        gradient, parameter.grad = parameter.grad.to(self._dtype), None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient

    def take(self) -> dict[str, torch.Tensor]:
        """The sums since the last call."""
        sums, self._sums = self._sums, {}
        return sums
