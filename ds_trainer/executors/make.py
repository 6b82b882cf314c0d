"""Which executor a run has."""

from __future__ import annotations

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine
from ds_trainer.executors.accumulate import AccumulateExecutor
from ds_trainer.executors.base import Executor
from ds_trainer.executors.pipeline import PipelineExecutor
from ds_trainer.loss import LossFunction
from ds_trainer.parallel.pipeline.stages import StagedModel


def make_executor(
    engine: Engine, loss: LossFunction, mesh: Mesh, staged: StagedModel | None, config: ParallelConfig
) -> Executor:
    """The executor of the run's layout.

    Args:
        engine: Runs the model.
        loss: Sums the losses of a micro-batch.
        mesh: Device and process groups.
        staged: This rank's pipeline stages; None: there is no pipeline.
        config: The config's parallel section.
    """
    if staged is None:
        return AccumulateExecutor(engine, loss, mesh)
    return PipelineExecutor(engine, loss, mesh, staged, config)
