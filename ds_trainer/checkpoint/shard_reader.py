"""Reads a sharded state: any rank reads any slice, however the writing ranks had sharded it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ds_trainer.checkpoint.shard_writer import INDEX, slice_key
from ds_trainer.engines.state_handles import MASTER
from ds_trainer.errors import CheckpointError
from ds_trainer.layout import ParameterSlice, TensorSlice
from ds_trainer.models.weight_source import WeightSource


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Turns the various errors of reading a malformed file into one.

    Raises:
        CheckpointError: A file of the checkpoint cannot be read.
    """
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error}",
            "a checkpoint is safetensors and JSON, as this version writes them",
            "set checkpoint.resume to another checkpoint",
        ) from error


class ShardReader:
    """Reads the sharded tensors of a checkpoint.

    Args:
        folder: A checkpoint whose files have been verified.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with read_errors(folder):
            index: Mapping[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.tensors = {fqn: _metadata(entry) for fqn, entry in index.items()}
            self._files = {fqn: [stored["file"] for stored in entry["boxes"]] for fqn, entry in index.items()}
        self._open = cache(lambda file: safe_open(folder / file, framework="pt"))

    def keys(self, name: str) -> list[str]:
        """Keys of a parameter's state, such as `exp_avg`."""
        return [fqn.partition("/")[0] for fqn in self.tensors if fqn.partition("/")[2] == name]

    def full(self, fqn: str) -> torch.Tensor | None:
        """A full tensor; None where the checkpoint does not hold it."""
        if fqn not in self.tensors:
            return None
        shape = tuple(self.tensors[fqn].size)
        return self.read(fqn, ParameterSlice.whole(fqn, shape)).view(shape)

    def read(self, fqn: str, piece: ParameterSlice) -> torch.Tensor:
        """The elements of a slice, flat, on the host.

        Args:
            fqn: `<key>/<parameter>`.
            piece: The slice, in the full tensor.

        Raises:
            CheckpointError: A file cannot be read.
        """
        out = torch.zeros(piece.numel, dtype=self.tensors[fqn].properties.dtype)
        self._fill(fqn, [(part.slice, part.of(out)) for part in piece.parts()])
        return out

    def read_slice(self, fqn: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """The elements of a slice, on the host.

        Args:
            fqn: `<key>/<parameter>`.
            tensor_slice: The slice, in the full tensor.

        Raises:
            CheckpointError: A file cannot be read.
        """
        out = torch.empty(tensor_slice.sizes, dtype=self.tensors[fqn].properties.dtype)
        self._fill(fqn, [(tensor_slice, out)])
        return out

    def _fill(self, fqn: str, wanted: list[tuple[TensorSlice, torch.Tensor]]) -> None:
        chunks = [
            ChunkStorageMetadata(torch.Size(tensor_slice.offsets), torch.Size(tensor_slice.sizes))
            for tensor_slice, _ in wanted
        ]
        with read_errors(self.folder):
            for item in create_read_items_for_chunk_list(fqn, self.tensors[fqn], chunks):
                number, target = item.storage_index.index, item.dest_index.index
                assert number is not None and target is not None and item.storage_index.offset is not None
                key = slice_key(MetadataIndex(fqn, item.storage_index.offset))
                source = self._open(self._files[fqn][number]).get_slice(key)
                lengths = tuple(item.lengths)
                stored, into = (
                    TensorSlice(tuple(item.storage_offsets), lengths),
                    TensorSlice(tuple(item.dest_offsets), lengths),
                )
                wanted[target][1][into.index] = source[stored.index] if lengths else source[...]


def _metadata(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(b["offsets"]), torch.Size(b["sizes"])) for b in entry["boxes"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, entry["dtype"])), torch.Size(entry["shape"]), chunks
    )


class MasterWeights(WeightSource):
    """Reads the fp32 master weights of a checkpoint, and parameters that were not trained from another source.

    Args:
        saved: The checkpoint's tensors.
        others: Source of frozen parameters and buffers.
    """

    def __init__(self, saved: ShardReader, others: WeightSource) -> None:
        self._saved, self._others = saved, others

    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """As in `WeightSource`."""
        fqn = f"{MASTER}/{name}"
        if fqn not in self._saved.tensors:
            return self._others.view(name, flat)
        if flat is not None:
            shape = tuple(self._saved.tensors[fqn].size)
            return self._saved.read(fqn, ParameterSlice.flat_range(name, shape, *flat))
        full = self._saved.full(fqn)
        assert full is not None
        return full

    def read_slice(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """As in `WeightSource`."""
        fqn = f"{MASTER}/{name}"
        return (
            self._saved.read_slice(fqn, tensor_slice)
            if fqn in self._saved.tensors
            else self._others.read_slice(name, tensor_slice)
        )

    def stored_dtype(self, name: str) -> torch.dtype:
        """As in `WeightSource`."""
        fqn = f"{MASTER}/{name}"
        known = self._saved.tensors.get(fqn)
        return self._others.stored_dtype(name) if known is None else known.properties.dtype
