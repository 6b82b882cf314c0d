"""The data and model groups of a run, in the words that DeepSpeed reads."""

from __future__ import annotations

import torch.distributed as dist

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import EngineError
from ds_trainer.parallel.model_split import ModelSplit


class ModelParallelUnit:
    """Megatron's `mpu`, as far as DeepSpeed asks it: ZeRO then cuts and reduces over the data ranks.

    The gradient norm is a sum over the ranks of a copy of the model, too, see `counts_in_norm`.

    Args:
        mesh: Process groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model."""
        return self._mesh.dp_group

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.grid.dp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share one copy of the model: tensor ranks of all pipeline stages."""
        return self._mesh.model_group

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.grid.model_size

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those of its stage: DeepSpeed counts what they hold alike on the first one."""
        return self._mesh.grid.tp_rank


def counts_in_norm(name: str, split: ModelSplit) -> bool:
    """Whether DeepSpeed's gradient norm takes in this rank's part of a parameter: `model_parallel`, its mark for that.

    Args:
        name: Parameter name.
        split: How the model is split.

    Raises:
        EngineError: Ranks hold a part of it each and share another; on every rank.
    """
    sharding = split.shardings.get(name)
    if sharding is None:
        return False  # Tensor rank 0 takes it in.
    counted = [sum(stop - start for start, stop in sharding.first_held(r)) for r in range(len(sharding.ranges))]
    held = [sum(stop - start for start, stop in ranges) for ranges in sharding.ranges]
    if any(0 < some < every for some, every in zip(counted, held, strict=True)):
        raise EngineError(
            f"of {name} tensor ranks hold one part each and copies of another, such as the only KV head",
            "DeepSpeed's gradient norm takes in a parameter as a whole or not at all",
            "set zero.stage to 0, parallel.engine to fsdp2, or parallel.tp to a number that divides the KV heads",
        )
    return counted[split.rank] > 0
