"""The data-parallel and model-parallel groups of a run, under the names that DeepSpeed calls."""

from __future__ import annotations

import torch.distributed as dist

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import EngineError
from ds_trainer.parallel.model_split import ModelSplit


class ModelParallelUnit:
    """Megatron's `mpu`, as far as DeepSpeed calls it: ZeRO then shards and reduces over the data-parallel ranks.

    The gradient norm is a sum over the ranks of a replica of the model, too, see `counts_in_norm`.

    Args:
        mesh: Process groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shards of the model."""
        return self._mesh.dp_group

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.grid.dp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share one replica of the model: tensor-parallel ranks of all pipeline stages."""
        return self._mesh.model_group

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.grid.model_size

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those of its stage: what all of them hold, DeepSpeed counts on the first one."""
        return self._mesh.grid.tp_rank


def counts_in_norm(name: str, split: ModelSplit) -> bool:
    """Whether this rank's shard of a parameter counts in DeepSpeed's gradient norm: its mark `model_parallel`.

    Args:
        name: Parameter name.
        split: How the model is split.

    Raises:
        EngineError: A rank's shard is partly its own and partly a replica; on every rank.
    """
    sharding = split.shardings.get(name)
    if sharding is None:
        return False  # It counts on tensor-parallel rank 0.
    counted = [sum(stop - start for start, stop in sharding.first_held(r)) for r in range(len(sharding.ranges))]
    held = [sum(stop - start for start, stop in ranges) for ranges in sharding.ranges]
    if any(0 < some < every for some, every in zip(counted, held, strict=True)):
        raise EngineError(
            f"of {name} each tensor-parallel rank holds a shard and a replica of another, such as the only KV head",
            "DeepSpeed's gradient norm counts all that a rank holds of a parameter or nothing",
            "set zero.stage to 0, parallel.engine to fsdp2, or parallel.tp to a number that divides the KV heads",
        )
    return counted[split.rank] > 0
