"""What DeepSpeed's engine leaves to us under a pipeline, whose passes are run past it."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.grad_sync import fill_where_others_have
from ds_trainer.errors import EngineError


def check_parameter_groups(optimizer: torch.optim.Optimizer, stage: int, mesh: Mesh) -> None:
    """ZeRO sums the norm of each parameter group over the stages by itself: with other numbers of them it hangs.

    Args:
        optimizer: The optimizer, not yet wrapped.
        stage: ZeRO stage.
        mesh: Process groups.

    Raises:
        EngineError: Stages differ in their number of groups; on every rank.
    """
    counts = mesh.gather_over_pp(len(optimizer.param_groups))
    if stage > 0 and len(set(counts)) > 1:
        raise EngineError(
            f"the ranks of a pipeline have {', '.join(map(str, counts))} parameter groups with trained parameters",
            "DeepSpeed sums the gradient norm group by group, so every stage needs the same groups",
            "train parameters of the same kinds in every stage, set optimizer.decay_norms_and_biases to true, or "
            "parallel.engine to ddp or fsdp2",
        )


def reduce_accumulated(engine: deepspeed.DeepSpeedEngine, trained: list[Any], stage: int, mesh: Mesh) -> None:
    """Reduces the gradients that all passes of a step have accumulated.

    Args:
        engine: DeepSpeed's engine.
        trained: Parameters that this rank owns and trains.
        stage: ZeRO stage.
        mesh: Process groups.

    Comm: DeepSpeed's reduction over the data-parallel ranks, in buckets of its own.
    """
    engine.set_gradient_accumulation_boundary(True)
    if stage > 0:
        engine.allreduce_gradients()
        return
    # At stage 0 its own reduction would include replicas of tied parameters.
    fill_where_others_have(trained, mesh.dp_host_group)
    engine.buffered_allreduce_fallback([p.grad for p in trained if p.grad is not None])
