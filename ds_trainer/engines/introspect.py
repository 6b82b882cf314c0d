"""Measures live tensors: dtypes, bytes of unique storages, devices, over how many ranks they are sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ds_trainer.parallel.model_split import ModelSplit

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by their names in the config."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors; views of one buffer count once."""
    storages = {}
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def stateless_bytes(optimizer: torch.optim.Optimizer, updated: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors that an optimizer updates, as long as it has made no states for them."""
    return 0 if state_tensors(optimizer) else storage_bytes(updated)


def grouped_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def devices(tensors: Iterable[torch.Tensor]) -> str:
    """The devices on which the tensors with content lie, joined by commas."""
    return ", ".join(sorted({str(t.device) for t in tensors if t.numel()}))


def measured_tp_size(split: ModelSplit, parameters: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Ranks over which tensor parallelism has sharded the model, by the shapes of its parameters; 1: it has not.

    Args:
        split: How it was to be sharded.
        parameters: What an engine holds; of one that ZeRO-3 has sharded in turn, the shape before that counts.
    """
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters}
    # Other pipeline stages have the other parameters.
    shardings = {name: sharding for name, sharding in split.shardings.items() if name in shapes}
    held = {len(sharding.ranges) if shapes[name] == sharding.local_shape else 1 for name, sharding in shardings.items()}
    return min(held, default=1)


def measured_pp_size(split: ModelSplit, names: Iterable[str]) -> int:
    """Ranks over which a pipeline has split the model; 1: it has not, or this rank holds more than its stages.

    Args:
        split: How it was to be split.
        names: Of the parameters that an engine holds.
    """
    if split.stages is None:
        return 1
    held = dict.fromkeys(names)
    expected = {name for name in split.stages.shapes if split.owns(name)} | split.shared(held).keys()
    return split.stages.group.size() if held.keys() == expected else 1


def content_hash(tensors: Iterable[torch.Tensor]) -> str:
    """Short hash of the tensors' values and order, computed where they lie.

    Two reductions per tensor: equal elements cancel out in the XOR of their bits, not in their sum.
    """
    digest = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        value = local_shard(tensor).detach()
        digest.update(f"{torch.hash_tensor(value).item()} {value.sum(dtype=torch.float64).item()!r}".encode())
    return digest.hexdigest()
