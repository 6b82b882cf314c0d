"""Cross entropy of logits whose columns are sharded over the tensor-parallel ranks; nothing gathers them.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3: "we fuse the output of the parallel GEMM
with the cross-entropy loss which reduces the dimension to b x s".

Legend: B samples, T positions, V tokens, v columns on a rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_trainer.loss import cross_entropy_sum
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
    columns = range(first, max(first, min(vocab_size, first + logits_BTv.shape[-1])))

    def reduced(x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        return all_reduced(x, group, op)

    return cross_entropy_sum(logits_BTv, labels_BT, label_smoothing, columns, vocab_size, reduced)
