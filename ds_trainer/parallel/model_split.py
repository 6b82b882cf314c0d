"""Which shards of a model this rank holds: reading them from full tensors, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist

from ds_trainer.layout import ParameterSlice, TensorSharding
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.tied_parameters import StageParameters

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSplit:
    """How tensor parallelism shards a model's parameters, and which of them this rank's pipeline stages have.

    Every tensor-parallel rank holds the full tensor of a parameter without a sharding.

    Args:
        shardings: Parameter name (of a tied one its first name) -> its sharding.
        rank: This rank's number in the tensor-parallel group.
        host_group: The tensor-parallel group over gloo; None: there is no tensor parallelism.
        whole_modules: Modules with unsharded parameters, the numbers of layers as `*`.
        stages: Which stage owns which parameter; None: there is no pipeline.
    """

    shardings: Mapping[str, TensorSharding] = field(default_factory=dict)
    rank: int = 0
    host_group: dist.ProcessGroup | None = None
    whole_modules: tuple[str, ...] = ()
    stages: StageParameters | None = None

    def owns(self, name: str) -> bool:
        """Whether this rank updates, counts and saves a parameter; False for a replica of another stage's."""
        return self.stages is None or self.stages.owns(name)

    def sum_tied(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Adds the gradients of replicas of tied parameters to their owners'; see `StageParameters`."""
        if self.stages is not None:
            self.stages.sum_tied(gradients)

    def refresh_tied(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Gives replicas of tied parameters their owners' values; see `StageParameters`."""
        if self.stages is not None:
            self.stages.refresh_tied(parameters)

    def shared(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Those of this rank's parameters that other pipeline stages have too."""
        return {} if self.stages is None else self.stages.shared(parameters)

    def slice(self, name: str, local_shape: tuple[int, ...], flat: tuple[int, int]) -> ParameterSlice:
        """The slice that elements `flat` of this rank's local tensor are.

        Args:
            name: Parameter name.
            local_shape: Shape of the local tensor, as the engine was given it.
            flat: Start and stop in the row-major flattened local tensor.
        """
        sharding = self.shardings.get(name)
        if sharding is None:
            return ParameterSlice(name, tuple(local_shape), flat)
        return ParameterSlice(name, sharding.shape, flat, sharding, self.rank)

    def counted(self, name: str, rows: torch.Tensor, first: int = 0) -> Iterator[torch.Tensor]:
        """Views of the elements that count in a sum over the tensor-parallel group: each of the full tensor once.

        Args:
            name: Parameter name.
            rows: The local tensor, or some of its rows.
            first: Number of the first of these rows in the local tensor.
        """
        sharding = self.shardings.get(name)
        if sharding is None:
            yield from [rows] if self.rank == 0 else []
            return
        offset = first if sharding.dim == 0 else 0
        for start, stop in sharding.first_held(self.rank):
            begin, end = max(start - offset, 0), min(stop - offset, rows.shape[sharding.dim])
            if begin < end:
                yield rows.narrow(sharding.dim, begin, end - begin)

    def merged(self, local: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The full model's tensors out of its ranks' shards, on every rank, one at a time.

        Args:
            local: Name and local tensor on the host, in the same order on every tensor-parallel rank.

        Comm: one all-gather over the tensor-parallel group of each sharded tensor; of stages that of `StageParameters`.
        """
        full = ((name, self._full(tensor, self.shardings.get(name))) for name, tensor in local)
        return full if self.stages is None else self.stages.merged(full)

    def _full(self, local: torch.Tensor, sharding: TensorSharding | None) -> torch.Tensor:
        if sharding is None:
            return local
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in sharding.ranges]
        dist.all_gather(shards, local.contiguous(), group=self.host_group)
        full = local.new_empty(sharding.shape)
        for shard, ranges in zip(shards, sharding.ranges, strict=True):
            at = 0
            for start, stop in ranges:
                full.narrow(sharding.dim, start, stop - start).copy_(shard.narrow(sharding.dim, at, stop - start))
                at += stop - start
        return full


class LocalWeights(WeightSource):
    """A `WeightSource` of local tensors: this rank's shards; padding is 0.

    Args:
        full: Source of full tensors.
        split: Which shards this rank holds.
    """

    def __init__(self, full: WeightSource, split: ModelSplit) -> None:
        self._full, self._split = full, split

    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """As in `WeightSource`, of the local tensor."""
        sharding = self._split.shardings.get(name)
        if sharding is None:
            return self._full.view(name, flat)
        piece = self._split.slice(name, sharding.local_shape, flat or (0, prod(sharding.local_shape)))
        shape = sharding.local_shape if flat is None else (piece.numel,)
        parts = list(piece.parts())
        if [part.slice.numel for part in parts] == [piece.numel]:  # The source's own memory will do.
            return self._full.read_slice(name, parts[0].slice).reshape(shape)
        local = torch.zeros(piece.numel, dtype=self.stored_dtype(name))
        for part in parts:
            part.of(local).copy_(self._full.read_slice(name, part.slice))
        return local.view(shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        """As in `WeightSource`."""
        return self._full.stored_dtype(name)
