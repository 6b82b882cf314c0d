"""Micro-batches one after the other, gradients accumulated: the executor of every layout without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine
from ds_trainer.executors.base import Evaluated, evaluated, to_device, unless_not_finite
from ds_trainer.loss import Batch, LossFunction


class AccumulateExecutor:
    """See `Executor`.

    Args:
        engine: Runs the model.
        loss: Sums the losses of a micro-batch.
        mesh: Device and process groups.
    """

    at_once = 1

    def __init__(self, engine: Engine, loss: LossFunction, mesh: Mesh) -> None:
        self._engine, self._loss, self._device = engine, loss, mesh.device

    def prepared(self, batches: Sequence[Batch]) -> list[Batch]:
        """Any number of micro-batches can run."""
        return list(batches)

    def train(self, batches: Sequence[Batch], step_tokens: int, weight: float) -> list[torch.Tensor]:
        """As in `Executor`. Comm: that of the engine."""
        sums = []
        for index, batch in enumerate(batches):
            batch = to_device(batch, self._device)
            with self._engine.microbatch(is_last=index == len(batches) - 1):
                outputs = self._engine.forward(**self._loss.inputs(batch))
                loss_sum = self._loss.loss_sum(outputs, batch, step_tokens)
                del outputs
                self._engine.backward(unless_not_finite(loss_sum * weight))
            sums.append(loss_sum.detach())
        return sums

    def evaluate(self, batches: Sequence[Batch], loss: LossFunction, keep_logits: bool) -> list[Evaluated]:
        """As in `Executor`. Comm: that of the engine."""
        found = []
        for batch in batches:
            batch = to_device(batch, self._device)
            found.append(evaluated(self._engine.forward(**loss.inputs(batch)), batch, loss, keep_logits))
        return found
