"""Cross entropy of logits whose columns are sharded over the tensor-parallel ranks; nothing gathers them.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3: "we fuse the output of the parallel GEMM
with the cross-entropy loss which reduces the dimension to b x s".

Legend: B samples, T positions, N = B T, V tokens, v columns on a rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ds_trainer.loss import IGNORE_INDEX
from ds_trainer.parallel.tensor.collectives import all_reduced


def vocab_parallel_cross_entropy_sum(
    logits_BTv: torch.Tensor,
    labels_BT: torch.Tensor,
    first: int,
    vocab_size: int,
    group: dist.ProcessGroup,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum of the cross entropies of all positions with a label, in fp32: the same number on every rank.

    Shapes: (B, T, v) on each rank -> ().

    Comm: forward two all-reduces over `group` of fp32 numbers per position: one, then two, or three with smoothing.

    Args:
        logits_BTv: This rank's columns, of one or more leading dimensions.
        labels_BT: Token at each position; -100: none.
        first: Token of this rank's first column.
        vocab_size: V; columns of tokens from there on are padding.
        group: The tensor-parallel group.
        label_smoothing: Weight of the uniform distribution in the target (Szegedy et al. 2016, section 7).
    """
    logits_Nv, labels_N = logits_BTv.flatten(0, -2), labels_BT.flatten()
    num_real = min(max(vocab_size - first, 0), logits_Nv.shape[1])
    return _CrossEntropySum.apply(logits_Nv, labels_N, first, num_real, vocab_size, group, label_smoothing)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Nv, labels_N, first, num_real, vocab_size, group, smoothing):
        has_label_N = labels_N != IGNORE_INDEX
        is_own_N = has_label_N & (labels_N >= first) & (labels_N < first + num_real)
        own_N1 = (labels_N - first).where(is_own_N, 0).unsqueeze(1)

        largest_N = logits_Nv.new_full(labels_N.shape, -torch.inf, dtype=torch.float32)
        if num_real:
            largest_N = logits_Nv[:, :num_real].amax(1).float()
        largest_N = all_reduced(largest_N, group, dist.ReduceOp.MAX)
        # fp16 and bf16 less fp32 is fp32. All that follows is relative to the largest: large logits lose no digits.
        shifted_Nv = logits_Nv - largest_N.unsqueeze(1)
        real_Nv = shifted_Nv[:, :num_real]
        parts = [shifted_Nv.gather(1, own_N1).squeeze(1).where(is_own_N, 0.0)]
        if smoothing:
            parts.append(real_Nv.sum(1))
        parts.append(real_Nv.exp_().sum(1))  # In place: this is the only tensor of its size that is made.
        target_N, *logit_sum_N, exp_sum_N = all_reduced(torch.stack(parts), group)

        loss_N = exp_sum_N.log() - (1 - smoothing) * target_N
        if smoothing:
            loss_N = loss_N - smoothing / vocab_size * logit_sum_N[0]
        ctx.save_for_backward(logits_Nv, largest_N, exp_sum_N, has_label_N, is_own_N, own_N1)
        ctx.num_real, ctx.vocab_size, ctx.smoothing = num_real, vocab_size, smoothing
        return loss_N.where(has_label_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits_Nv, largest_N, exp_sum_N, has_label_N, is_own_N, own_N1 = ctx.saved_tensors
        grad_Nv = (logits_Nv[:, : ctx.num_real] - largest_N.unsqueeze(1)).exp_().div_(exp_sum_N.unsqueeze(1))
        if ctx.smoothing:
            grad_Nv -= ctx.smoothing / ctx.vocab_size
        if ctx.num_real:
            grad_Nv.scatter_add_(1, own_N1, (ctx.smoothing - 1) * is_own_N.unsqueeze(1).to(grad_Nv.dtype))
        grad_Nv = grad_Nv.mul_((grad * has_label_N).unsqueeze(1)).to(logits_Nv.dtype)
        if padding := logits_Nv.shape[1] - ctx.num_real:
            grad_Nv = F.pad(grad_Nv, (0, padding))
        return grad_Nv, None, None, None, None, None, None
