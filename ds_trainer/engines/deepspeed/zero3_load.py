"""Loads a model straight into ZeRO-3's partitions: no rank ever holds, or reads, more than its own slices.

`deepspeed.zero.Init` partitions parameters that every rank holds in full, and broadcasts them from rank 0 first. Here
each rank reserves space for one full tensor, fills in only the range that it owns, and lets DeepSpeed copy that range
(to host memory or to NVMe, as its config says). On the host, pages that are not touched never become memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.deepspeed.internals import Partitioner
from ds_trainer.engines.deepspeed.mpu import ModelParallelUnit
from ds_trainer.layout import even_flat_range
from ds_trainer.models.load_weights import fill_buffers, set_value
from ds_trainer.models.weight_source import WeightSource


def load_partitioned(
    model: nn.Module, weights: WeightSource, native: dict[str, Any], dtype: torch.dtype, mesh: Mesh
) -> None:
    """Partitions a model in place.

    Args:
        model: A skeleton on meta, or an instance.
        weights: Where the values are read from.
        native: The DeepSpeed JSON.
        dtype: Dtype of the partitions.
        mesh: Process groups and device.

    Shapes: each parameter of n elements becomes a flat shard of ceil(n / dp size) elements per rank.
    """
    fill_buffers(model, weights, mesh.device)
    # Its dtype follows from the JSON: DeepSpeed 0.19 on CPU takes an explicit `dtype` of fp32 for bf16.
    partitioner = Partitioner(
        config_dict_or_path=native, data_parallel_group=mesh.dp_group, mpu=ModelParallelUnit(mesh)
    )
    # ZeRO++ keeps a second copy per node, taken from the full tensor.
    reads_all = native["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    # Nothing but shards is made in the loop: tensors made and freed between them leave holes in glibc's heap that no
    # later one fits into, and a rank of 2 then holds up to 0.8 of the model.
    space = torch.empty(max(p.numel() for p in model.parameters()), dtype=dtype, device=mesh.device)
    for name, parameter in model.named_parameters():
        value = space[: parameter.numel()].view(parameter.shape)
        start, stop = 0, value.numel()
        if not reads_all:
            start, stop = even_flat_range(value.numel(), mesh.grid.dp_size, mesh.grid.dp_rank)
        if stop > start:
            value.view(-1)[start:stop] = weights.view(name, (start, stop))
        set_value(parameter, value)
        partitioner.partition(parameter)


def partition_bounds(parameter: Any) -> tuple[int, int]:
    """Start and stop of this rank's shard in the flattened parameter, without padding."""
    return even_flat_range(parameter.ds_numel, parameter.ds_zero_partition_world_size, parameter.ds_zero_partition_rank)
