"""The executor protocol: how micro-batches run on an engine, one after the other or through a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ds_trainer.loss import Batch, LossFunction


@dataclass(frozen=True)
class Evaluated:
    """The results of one evaluated micro-batch.

    Args:
        loss_sum: Sum of the losses of its label tokens.
        logits: On the host; None unless requested.
    """

    loss_sum: float
    logits: np.ndarray | None


class Executor(Protocol):
    """Runs micro-batches, of which every rank has the same number."""

    at_once: int
    """Number of micro-batches to pass to `evaluate` in one call."""

    def prepared(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches to run: fillers without labels are added where it cannot run this number of them.

        Raises:
            UserError: A micro-batch cannot run.
        """

    def train(self, batches: Sequence[Batch], step_tokens: int, weight: float) -> list[torch.Tensor]:
        """Runs forward and backward of one step.

        Args:
            batches: This rank's, as `prepared` has returned them.
            step_tokens: Label tokens of the step, over all micro-batches and ranks.
            weight: Factor of each micro-batch's sum of losses.

        Returns:
            These sums, detached; on a rank that does not compute the loss an empty list.
        """

    def evaluate(self, batches: Sequence[Batch], loss: LossFunction, keep_logits: bool) -> list[Evaluated]:
        """Runs forward only, without gradients.

        Args:
            batches: This rank's.
            loss: Sums their losses.
            keep_logits: Whether logits are wanted.

        Returns:
            One result per micro-batch; on a rank that does not compute the loss an empty list.
        """


def evaluated(outputs: object, batch: Batch, loss: LossFunction, keep_logits: bool) -> Evaluated:
    """The results of a micro-batch, from the model's outputs."""
    count = loss.num_tokens(batch)
    loss_sum = float(loss.loss_sum(outputs, batch, count)) if count else 0.0
    return Evaluated(loss_sum, outputs["logits"].float().cpu().numpy() if keep_logits else None)  # type: ignore[index]


def unless_not_finite(loss_sum: torch.Tensor) -> torch.Tensor:
    """The loss, or NaN where it is not finite, which makes every gradient NaN, so that no engine updates."""
    return loss_sum * torch.where(loss_sum.detach().isfinite(), 1.0, torch.nan)


def to_device(batch: Batch, device: torch.device) -> dict:
    """The batch with its tensors on the device."""
    return {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}
