"""Which pipeline stage owns which parameter, and how stages keep tied parameters equal.

The first stage and the last use a tied weight, such as that of the input embedding and the head. The stage that uses it
first owns it: it alone has its optimizer state, counts it in the norm and saves it. The other one has a replica. It
sends the replica's gradient to the owner before the update, and receives the owner's value after it. So replicas are
equal bit for bit, whatever the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
_ABSENT = -1
T = TypeVar("T")


@dataclass(frozen=True)
class StageParameters:
    """The parameters of a model that is split into stages.

    Args:
        shapes: Every parameter's name in the order of the full model (a tied one's first name) -> its full shape.
        owners: Every parameter's name -> the pipeline rank that owns it.
        replicas: Of parameters that further pipeline ranks have a replica of: name -> these ranks.
        rank: This rank's number in the pipeline.
        group: The pipeline, over the device's backend.
        host_group: The pipeline, over gloo.
    """

    shapes: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, int]
    replicas: Mapping[str, tuple[int, ...]]
    rank: int
    group: dist.ProcessGroup
    host_group: dist.ProcessGroup

    def owns(self, name: str) -> bool:
        """Whether this rank updates and saves the parameter."""
        return self.owners[name] == self.rank

    def sum_tied(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Adds the gradients of replicas to their owner's, in place, before the norm and the update.

        Args:
            gradients: This rank's, by parameter name, or its shard of them; None: it has none.

        Comm: each replica sends its gradient to the owner of the same dp and tp rank; nothing without tied weights.
        """
        for name, holders in self._shared():
            gradient = gradients.get(name)
            if gradient is None:  # Frozen, which it is on every stage.
                continue
            if not self.owns(name):
                dist.send(gradient.contiguous(), group=self.group, group_dst=self.owners[name])
                continue
            for holder in holders:
                received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
                dist.recv(received, group=self.group, group_src=holder)
                gradient += received

    def refresh_tied(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Gives replicas the value that their owner has after the update.

        Args:
            parameters: This rank's, by name, or its shards of them, as plain tensors.

        Comm: the owner sends its value to each replica of the same dp and tp rank.
        """
        with torch.no_grad():
            for name, holders in self._shared():
                value = parameters[name]
                if self.owns(name):
                    for holder in holders:
                        dist.send(value.contiguous(), group=self.group, group_dst=holder)
                else:
                    received = torch.empty_like(value, memory_format=torch.contiguous_format)
                    dist.recv(received, group=self.group, group_src=self.owners[name])
                    value.copy_(received)

    def shared(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Those of this rank's parameters that other stages have too."""
        return {name: parameters[name] for name, _ in self._shared()}

    def _shared(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Parameters that this rank shares with others, and the ranks that have replicas."""
        for name, holders in self.replicas.items():
            if self.owns(name) or self.rank in holders:
                yield name, holders

    def merged(self, local: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The full model's tensors out of those of its stages, on every rank, one at a time, in the model's order.

        Args:
            local: Name and full tensor on the host of this rank's parameters, or of some of them, in its own order.
                What it does not own is left out.

        Comm: for each parameter one broadcast of a number, and one of the tensor where its owner has it.
        """
        owned = ((name, tensor) for name, tensor in local if self.owns(name))
        waiting = next(owned, None)
        for name, shape in self.shapes.items():
            mine = waiting is not None and waiting[0] == name
            tensor = waiting[1] if waiting is not None and mine else None
            tensor = self._broadcast(tensor, shape, self.owners[name])
            if mine:
                waiting = next(owned, None)
            if tensor is not None:
                yield name, tensor
        assert waiting is None, f"{waiting[0]} is not where the full model has it"

    def _broadcast(self, tensor: torch.Tensor | None, shape: tuple[int, ...], owner: int) -> torch.Tensor | None:
        code = torch.tensor(_ABSENT if tensor is None else _DTYPES.index(tensor.dtype))
        dist.broadcast(code, group=self.host_group, group_src=owner)
        if code == _ABSENT:
            return None
        if tensor is None:
            tensor = torch.empty(shape, dtype=_DTYPES[int(code)])
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.host_group, group_src=owner)
        return tensor
