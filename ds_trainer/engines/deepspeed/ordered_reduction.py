"""Gradients at ZeRO stages 1 and 2 are reduced in one order on all ranks, whichever modules each rank ran.

DeepSpeed fills its buckets in the order in which a rank's backward pass finishes gradients, and leaves out parameters
that got none. Where ranks ran different modules it would add up gradients of different parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class OrderedReduction:
    """Hands gradients to DeepSpeed's buckets in a fixed order, as DDP does, and zeros for those that a rank lacks.

    The order is that in which a backward pass usually finishes them, so that reduction overlaps with it as before.

    Args:
        optimizer: DeepSpeed's optimizer of stage 1 or 2; two of its methods are replaced.
        trained: Parameters that are trained, in the order of the model.
    """

    def __init__(self, optimizer: Any, trained: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        groups = {id(p): index for index, group in enumerate(optimizer.bit16_groups) for p in group}
        self._order = [(p, groups[id(p)]) for p in reversed(trained)]
        self._ready: set[int] = set()
        self._handed_over = 0
        self._reduce, self._finish = (
            optimizer.reduce_ready_partitions_and_remove_grads,
            optimizer.overlapping_partition_gradients_reduce_epilogue,
        )
        optimizer.reduce_ready_partitions_and_remove_grads = self._is_ready
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._reduce_rest

    def _is_ready(self, parameter: torch.Tensor, group: int) -> None:
        if not (self._optimizer.partition_gradients or self._optimizer.is_gradient_accumulation_boundary()):
            return
        self._ready.add(id(parameter))
        while self._handed_over < len(self._order) and id(self._order[self._handed_over][0]) in self._ready:
            self._hand_over()

    def _reduce_rest(self) -> None:
        """At the end of a backward pass that reduces.

        Comm: DeepSpeed's, of buckets that are not yet reduced.
        """
        while self._ready and self._handed_over < len(self._order):
            self._hand_over()
        self._ready.clear()
        self._handed_over = 0
        self._finish()

    def _hand_over(self) -> None:
        parameter, group = self._order[self._handed_over]
        if self._optimizer.get_gradient_for_reduction(parameter) is None:
            self._fill_with_zeros(parameter)
        self._reduce(parameter, group)
        self._handed_over += 1

    def _fill_with_zeros(self, parameter: Any) -> None:
        if self._optimizer.use_grad_accum_attribute:
            parameter.grad_accum = torch.zeros_like(parameter, dtype=self._optimizer.gradient_accumulation_dtype)
        else:
            parameter.grad = torch.zeros_like(parameter)
