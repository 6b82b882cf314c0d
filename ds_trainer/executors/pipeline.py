"""Micro-batches through the stages of a pipeline, several of them in flight: written once, on the engine protocol.

A rank's stages are one model, which its engine has wrapped. The pipeline's runtime decides which stage runs which
micro-batch when, sends hidden states and their gradients from rank to rank, and runs the backward passes. All ranks of
a pipeline have the same micro-batches, and the last stage computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine
from ds_trainer.errors import DataError
from ds_trainer.executors.base import Evaluated, evaluated, to_device, unless_not_finite
from ds_trainer.loss import IGNORE_INDEX, Batch, LossFunction
from ds_trainer.parallel.pipeline.runtime import PipelineRuntime
from ds_trainer.parallel.pipeline.stages import StagedModel
from ds_trainer.planning.pp_schedules import Schedule, forward_only, make_schedule, next_accepted


class PipelineExecutor:
    """See `Executor`.

    Args:
        engine: Runs this rank's stages.
        loss: Sums the losses of a micro-batch, on the last stage.
        mesh: Device and process groups.
        staged: This rank's stages.
        config: The config's parallel section.
    """

    def __init__(
        self, engine: Engine, loss: LossFunction, mesh: Mesh, staged: StagedModel, config: ParallelConfig
    ) -> None:
        assert config.virtual_stages is not None
        self._engine, self._loss, self._device, self._staged = engine, loss, mesh.device, staged
        self._layout = (config.schedule, config.pp, config.virtual_stages)
        self._last_stage = config.pp * config.virtual_stages - 1
        self._runtime = PipelineRuntime(mesh.pp_group, mesh.pp_host_group, mesh.device)
        self.at_once = 2 * config.pp

    def prepared(self, batches: Sequence[Batch]) -> list[Batch]:
        """Adds micro-batches without labels up to a number that the schedule takes; an epoch may end in a short step.

        Raises:
            DataError: A micro-batch has no `input_ids`.
        """
        for batch in batches:
            if "input_ids" not in batch:
                raise DataError(
                    f"a batch has {', '.join(sorted(batch))} and no input_ids",
                    "every stage of a pipeline knows the shape of a micro-batch's hidden states from its input_ids",
                    "let the data_collator return input_ids, or set parallel.pp to 1",
                )
        missing = next_accepted(*self._layout, at_least=len(batches)) - len(batches)
        return [*batches, *(_without_labels(batches[-1]) for _ in range(missing))]

    def train(self, batches: Sequence[Batch], step_tokens: int, weight: float) -> list[torch.Tensor]:
        """As in `Executor`.

        Comm: between neighbouring stages the hidden states of each micro-batch and their gradient; and that of the
            engine.
        """
        sums: dict[int, torch.Tensor] = {}

        def scaled_loss(microbatch: int, outputs: object, batch: Batch) -> torch.Tensor:
            loss_sum = self._loss.loss_sum(outputs, batch, step_tokens)
            sums[microbatch] = loss_sum.detach()
            return self._engine.scale_loss(unless_not_finite(loss_sum * weight))

        with self._engine.pipeline():
            self._run(make_schedule(*self._layout, len(batches)), batches, self._loss, scaled_loss)
        return [sums[i] for i in sorted(sums)]

    def evaluate(self, batches: Sequence[Batch], loss: LossFunction, keep_logits: bool) -> list[Evaluated]:
        """As in `Executor`.

        Comm: between neighbouring stages the hidden states of each micro-batch; and that of the engine.
        """
        found: dict[int, Evaluated] = {}

        def evaluate(microbatch: int, outputs: object, batch: Batch) -> torch.Tensor:
            found[microbatch] = evaluated(outputs, batch, loss, keep_logits)
            return torch.tensor(found[microbatch].loss_sum)

        self._run(forward_only(*self._layout, len(batches)), batches, loss, evaluate)
        return [found[i] for i in sorted(found)]

    def _run(
        self,
        schedule: Schedule,
        batches: Sequence[Batch],
        loss: LossFunction,
        at_end: Callable[[int, object, Batch], torch.Tensor],
    ) -> None:
        on_device = [to_device(batch, self._device) for batch in batches]

        def forward(stage: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
            batch, is_last = on_device[microbatch], stage == self._last_stage
            inputs = loss.inputs(batch) if is_last else {k: v for k, v in batch.items() if k != "labels"}
            outputs = self._engine.forward(pipeline_stage=stage, hidden_states=hidden, **inputs)
            return at_end(microbatch, outputs, batch) if is_last else outputs

        shapes = [batch["input_ids"].shape for batch in batches]
        self._runtime.run(
            schedule,
            forward,
            [(samples, self._staged.hidden_length(positions)) for samples, positions in shapes],
        )


def _without_labels(batch: Batch) -> Batch:
    """A micro-batch that adds nothing to loss and gradients."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
