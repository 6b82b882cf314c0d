"""The passes of one step: the consensus of ranks before them, and the loss after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_trainer.data.consistency import batch_digest, check_same_batches, digest_term
from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.executors.base import Executor
from ds_trainer.loss import Batch, LossFunction


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step.

    Args:
        loss_sum: Sum of the losses of all label tokens, over all ranks.
        num_tokens: Label tokens of the step, over all ranks.
        seen_tokens: Tokens of the step that are not padding, over all ranks.
        bad_microbatches: This rank's micro-batches whose loss is not finite.
    """

    loss_sum: float
    num_tokens: int
    seen_tokens: int
    bad_microbatches: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Loss per label token; nan where the step has none."""
        return self.loss_sum / self.num_tokens if self.num_tokens else float("nan")


def run_step(
    microbatches: Iterable[Batch],
    samples: Sequence[Sequence[int]],
    executor: Executor,
    loss: LossFunction,
    mesh: Mesh,
    place: str,
) -> StepLoss:
    """Runs forward and backward of every micro-batch of one step.

    Every rank passes the same number of micro-batches. A step without any label token runs nothing.

    Args:
        microbatches: This rank's.
        samples: Indices of each one's samples; of a filler none.
        executor: Runs them.
        loss: Counts their label tokens.
        mesh: Process groups.
        place: The step's name in the consensus, such as "step 4".

    Comm: a consensus of all ranks that they have their batches, which sums the tokens too, before the first forward,
        and one all-reduce of the loss over the data-parallel ranks after the last backward, and one over the stages;
        and that of the executor.

    Raises:
        UserError: A rank's samples are wrong; the same error on every rank.
    """
    with consensus(mesh, place) as outcome:
        batches = list(microbatches)
        # Checked and counted on the host: a GPU would have to be waited for.
        check_labels(batches, samples, loss)
        counts = sum(loss.num_tokens(batch) for batch in batches), sum(map(seen_tokens, batches))
        digest = batch_digest(batches, mesh.grid)
        outcome.values = *counts, digest_term(digest, mesh.grid)
        batches = executor.prepared(batches)
    total, seen = map(int, outcome.sums[:2])
    check_same_batches(outcome.sums[2], digest, mesh, place)
    if total == 0:
        return StepLoss(0.0, 0, seen, ())
    sums = executor.train(batches, total, 1 / total)
    local_sum = torch.stack(sums).sum(dtype=torch.float64).item() if sums else 0.0
    bad = tuple(i for i, value in enumerate(sums) if not torch.isfinite(value))
    return StepLoss(mesh.sum_over_pp(*mesh.sum_over_dp(local_sum))[0], total, seen, bad)


def check_labels(batches: Sequence[Batch], samples: Sequence[Sequence[int]], loss: LossFunction) -> None:
    """Checks the labels of micro-batches; see `LossFunction.check`.

    Args:
        batches: This rank's.
        samples: Indices of each one's samples; of a filler none.
        loss: Knows what their labels are.
    """
    for batch, of_batch in zip(batches, samples, strict=True):
        if of_batch:
            loss.check(batch, of_batch)


def seen_tokens(batch: Batch) -> int:
    """Tokens of a batch that are not padding; its first tensor's elements where it has no attention mask."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return next((value.numel() for value in batch.values() if torch.is_tensor(value)), 0)
