"""What a NaN or infinite loss or gradient leads to; the weights are untouched either way."""

from __future__ import annotations

import math
from typing import NoReturn

from ds_trainer.config.schema import RunConfig
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import NonFiniteError
from ds_trainer.executors.step import StepLoss


class NonFinitePolicy:
    """Stops the run on all ranks before the update, or counts skipped steps up to a limit.

    Args:
        config: The run's config.
        sampler: Says which samples a step holds.
        mesh: Process groups.

    Attributes:
        in_a_row: Steps skipped in a row so far.
    """

    def __init__(self, config: RunConfig, sampler: GlobalBatchSampler, mesh: Mesh) -> None:
        self._run = config.run
        # With fp16, gradients out of range are normal: the loss scale goes down.
        self._skips = config.run.on_non_finite == "skip" or config.precision.dtype == "fp16"
        scale = config.precision.loss_scale
        descent = scale.initial_scale_power + scale.hysteresis - 1 if config.precision.dtype == "fp16" else 0
        self._limit = config.run.max_skipped_steps + descent
        self._sampler, self._mesh = sampler, mesh
        self.in_a_row = 0

    def check_loss(self, step_loss: StepLoss, step: int) -> None:
        """Raises before the update if the loss of `step` (from 0) is not finite and the policy is to stop.

        Comm: one gather of sample indices, only when it is not finite.

        Raises:
            NonFiniteError: On every rank, naming step, ranks and samples.
        """
        if math.isfinite(step_loss.loss_sum) or self._run.on_non_finite == "skip":
            return
        samples = self._sampler.microbatches(step)
        bad = self._mesh.gather_over_world([samples[i] for i in step_loss.bad_microbatches])
        where = "; ".join(f"rank {rank}, samples {of_rank}" for rank, of_rank in enumerate(bad) if of_rank)
        self._stop(f"the loss of step {step + 1} is not finite ({where})", step)

    def after_step(self, step: int, skipped: bool) -> None:
        """Counts a skipped update of `step` (from 0).

        Raises:
            NonFiniteError: It was skipped and the policy is to stop, or more were skipped in a row than allowed.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        if not self._skips:
            samples = self._sampler.global_batch(step)
            self._stop(f"the gradient of step {step + 1} is not finite though its loss is (samples {samples})", step)
        if self.in_a_row > self._limit:
            self._stop(f"{self.in_a_row} steps in a row, up to step {step + 1}, were not finite", step)

    def _stop(self, found: str, step: int) -> NoReturn:
        error = NonFiniteError(
            f"{found}; the weights are those after step {step}",
            "a NaN or infinite gradient would destroy every weight",
            "look at these samples, lower optimizer.lr or set optimizer.max_grad_norm; "
            "run.on_non_finite = skip drops such steps, up to run.max_skipped_steps in a row",
        )
        error.on_all_ranks = True  # Loss and norm are reduced over all ranks: each one raises.
        raise error
