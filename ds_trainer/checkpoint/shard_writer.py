"""Sharded tensors as safetensors files and a JSON index, written through torch.distributed.checkpoint.

A tensor of a parameter's state is kept under `<key>/<parameter>`, such as `exp_avg/model.norm.weight`, in slices of its
full shape. Every rank offers the slices that it owns; torch.distributed.checkpoint assigns a slice that several ranks
own to the one that has least to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ds_trainer.engines.state_handles import State, StateTensor
from ds_trainer.layout import ParameterSlice

INDEX = "index.json"
_FILE_BYTES = 1 << 30
"""Size of a file, which is filled in host memory before it is written."""


class Shard:
    """This rank's slices of one tensor, in the form that torch.distributed.checkpoint takes.

    Args:
        handle: Gives the values.
        piece: What the rank owns of the full tensor.
    """

    def __init__(self, handle: StateTensor, piece: ParameterSlice) -> None:
        self._handle, self._shape = handle, piece.shape
        self._parts = {part.slice.offsets: part for part in piece.parts()}

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._handle.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(part.slice.sizes)),
                    properties,
                    torch.Size(self._shape),
                ),
            )
            for offsets, part in self._parts.items()
        ]

    def read(self) -> torch.Tensor:
        """The values of all slices, flat, on the host."""
        return self._handle.read().reshape(-1).cpu()

    def slice_values(self, values: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
        """The values of the slice at `offsets`, out of those of all slices."""
        return self._parts[offsets].of(values).contiguous()


def make_shards(state: State, layout: list[ParameterSlice]) -> dict[str, Shard]:
    """This rank's shards of all states, by `<key>/<parameter>`.

    Args:
        state: The engine's handles.
        layout: The engine's slices.
    """
    slices = {piece.name: piece for piece in layout}
    return {
        f"{key}/{name}": Shard(handle, state_slice(slices[name], handle))
        for name, handles in state.items()
        for key, handle in handles.items()
    }


def state_slice(piece: ParameterSlice, handle: StateTensor) -> ParameterSlice:
    """What a state tensor holds: the same slice as the parameter, or a full tensor of another shape."""
    return piece if handle.shape == (piece.numel,) else ParameterSlice.whole(piece.name, handle.shape)


class _Planner(dcp.DefaultSavePlanner):
    """torch.distributed.checkpoint's planner, which by itself looks up tensors only."""

    _held: tuple[str, torch.Tensor] | None = None
    """Name and values of the shard that was read last: its slices follow one another, so it is read once."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        shard: Shard = self.state_dict[index.fqn]
        if self._held is None or self._held[0] != index.fqn:
            self._held = index.fqn, shard.read()
        return shard.slice_values(self._held[1], tuple(index.offset))


class SafetensorsWriter(StorageWriter):
    """Writes each rank's slices to its own files, and the index on the coordinator.

    Args:
        folder: An existing folder.
        rank: This rank's global rank, which its file names contain.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing depends on being the coordinator."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Takes the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Takes the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, at most `_FILE_BYTES` of memory at a time."""
        results: list[WriteResult] = []
        for number, portion in enumerate(_portions(plan, planner)):
            file = f"state-{self._rank:05d}-{number:03d}.safetensors"
            save_file({slice_key(index): tensor for index, tensor in portion.items()}, self._folder / file)
            results += [WriteResult(index, tensor.nbytes, file) for index, tensor in portion.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index: dtype, shape, and the slices of every tensor with their files."""
        files = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index: dict[str, Any] = {}
        for fqn, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            index[fqn] = {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": list(tensor.size),
                "boxes": [
                    {"offsets": list(c.offsets), "sizes": list(c.sizes), "file": files[MetadataIndex(fqn, c.offsets)]}
                    for c in tensor.chunks
                ],
            }
        (self._folder / INDEX).write_text(json.dumps(index), encoding="utf-8")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A folder on a disk."""
        return isinstance(checkpoint_id, str | Path)


def _portions(plan: SavePlan, planner: SavePlanner) -> Iterator[dict[MetadataIndex, torch.Tensor]]:
    """The plan's tensors in the order of the plan, in portions of about `_FILE_BYTES`."""
    portion: dict[MetadataIndex, torch.Tensor] = {}
    filled = 0
    for item in plan.items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        if portion and filled + tensor.nbytes > _FILE_BYTES:
            yield portion
            portion, filled = {}, 0
        portion[item.index] = tensor
        filled += tensor.nbytes
    if portion:
        yield portion


def slice_key(index: MetadataIndex) -> str:
    """Name of a slice in its file: the tensor's name and the slice's offsets, as in `master/lm_head.weight@4,0`."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def write_shards(shards: Mapping[str, Shard], folder: Path, rank: int) -> None:
    """Writes a sharded state. A collective.

    Args:
        shards: This rank's shards by name.
        folder: An existing folder that every rank sees.
        rank: This rank's global rank.

    Raises:
        dcp.api.CheckpointException: On every rank, if one could not write.
    """
    dcp.save(
        dict(shards),
        storage_writer=SafetensorsWriter(folder, rank),
        planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
