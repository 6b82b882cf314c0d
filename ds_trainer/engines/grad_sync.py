"""Reduces a step's gradients over the data ranks at once, where no wrapper of the model does so in its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors


def average_over_ranks(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, sent_as: torch.dtype | None = None
) -> None:
    """Makes gradients their means over the ranks of a group, in place.

    Args:
        gradients: The same on every rank, in the same order.
        group: The data ranks, over the device's backend.
        bucket_bytes: Gradients are sent in flat buckets of about this size.
        sent_as: Format in which they are sent and summed; None: their own.

    Comm: one all-reduce per bucket over `group`; none where it has one rank.
    """
    if group.size() == 1:
        return
    for bucket in _take_tensors(gradients, bucket_bytes):
        flat = _flatten_dense_tensors(bucket).to(sent_as or bucket[0].dtype)
        flat /= group.size()  # First: a sum in fp16 could overflow.
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def fill_where_others_have(parameters: Sequence[nn.Parameter], host_group: dist.ProcessGroup) -> None:
    """Gives parameters without a gradient one of zeros where another rank has one.

    Args:
        parameters: The same on every rank, in the same order.
        host_group: The data ranks, over gloo.

    Comm: one all-reduce of a byte per parameter.
    """
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=host_group)
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
