"""Column layers that read the same tensor are computed at once, so that their input gradients are summed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_trainer.parallel.tensor.columns import columns

if TYPE_CHECKING:
    from ds_trainer.parallel.tensor.linear import ColumnParallelLinear


class ColumnGroup:
    """Column layers that are called one after the other with one tensor, such as q, k and v, or gate and up.

    The first one called computes the outputs of all and keeps the others' until they are asked for. A layer that is
    then called with another tensor, or not at all, is a group of its own from the next forward pass on: right from the
    first call, at the cost of one output that nobody uses. Not at once: activations that are recomputed in the backward
    pass must be computed as they were.

    Args:
        members: The layers, of equal `in_features`; each gets this group as its `column_group`.
        group: Tensor ranks.

    Attributes:
        keep_gathered_input: Whether an input gathered from the ranks' positions is kept for the backward pass.
    """

    def __init__(self, members: Iterable[ColumnParallelLinear], group: dist.ProcessGroup) -> None:
        self.members = list(members)
        self.keep_gathered_input = False
        self._group = group
        self._input: torch.Tensor | None = None
        self._outputs: dict[ColumnParallelLinear, torch.Tensor] = {}
        self._kept_in_backward = False
        self._leaving: set[ColumnParallelLinear] = set()
        for member in self.members:
            member.column_group = self

    def output(self, member: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """A member's output for a tensor, see `columns`."""
        if member not in self._outputs:
            if not _in_backward():
                self._let_go()
            if member.column_group is not self:
                return member.column_group.output(member, x)
            outputs = columns(x, self.members, self._group, self.keep_gathered_input)
            self._input, self._outputs = x, dict(zip(self.members, outputs, strict=True))
            self._kept_in_backward = _in_backward()
        output = self._outputs.pop(member)
        if x is not self._input:
            self._leaving.add(member)
            (output,) = columns(x, [member], self._group, self.keep_gathered_input)
        if not self._outputs:
            self._input = None
        return output

    def _let_go(self) -> None:
        """Gives the layers that have not been called with the others a group each."""
        if not self._kept_in_backward:  # There, recomputation stops as soon as it has what it needs.
            self._leaving |= self._outputs.keys()
        for member in self._leaving:
            self.members.remove(member)
            ColumnGroup([member], self._group).keep_gathered_input = self.keep_gathered_input
        self._leaving.clear()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
