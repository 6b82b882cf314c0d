"""One pass over a data set without updates: the token mean of the loss, and predictions where they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ds_trainer.data.consistency import batch_digest, check_same_batches, digest_term
from ds_trainer.data.loader import BatchLoader
from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine
from ds_trainer.executors.base import Evaluated, Executor
from ds_trainer.launch.signals import StopRequested
from ds_trainer.loss import IGNORE_INDEX, Batch, LossFunction, with_logits


@dataclass(frozen=True)
class EvaluationResult:
    """What a pass found, the same on every rank.

    Args:
        loss: Token mean over the whole data set; nan where it has no label token.
        num_tokens: Label tokens of the data set.
        seconds: Wall time.
        predictions: Logits by sample, padded with -100 on the right; None unless asked for.
        label_ids: Labels by sample, padded with -100; None unless asked for.
    """

    loss: float
    num_tokens: int
    seconds: float
    predictions: np.ndarray | None = None
    label_ids: np.ndarray | None = None


def run_evaluation(
    loader: BatchLoader,
    engine: Engine,
    executor: Executor,
    loss: LossFunction,
    mesh: Mesh,
    collect_predictions: bool = False,
    after_microbatch: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Runs the whole data set once, in constant memory unless predictions are collected.

    Every rank runs the same number of forward passes, fillers included, since ZeRO-3 gathers parameters in each.

    Args:
        loader: The data set.
        engine: Holds the model.
        executor: Runs it.
        loss: Sums the losses.
        mesh: Process groups.
        collect_predictions: Whether logits and labels are wanted.
        after_microbatch: Called for every micro-batch that has been evaluated.

    Comm: a consensus of all ranks per global batch, or of a pipeline per some of them, that all have their samples,
        and one all-reduce of two numbers over the data ranks; with predictions, one gather of them at the end; of a
        pipeline the same from its last stage to the others.

    Raises:
        UserError: A rank's samples are wrong; on every rank, in its words.
        StopRequested: A signal asks for the end of the run.
    """
    began = time.monotonic()
    if collect_predictions:
        loss = with_logits(loss)
    local_sum, local_tokens = 0.0, 0
    rows: list[tuple[int, np.ndarray, np.ndarray]] = []
    every = loader.sampler.steps_per_epoch
    with closing(loader), eval_mode(engine), torch.no_grad():
        for first in range(0, every, executor.at_once):
            steps = range(first, min(first + executor.at_once, every))
            place = f"batch {first + 1} of the evaluation"
            mesh.monitor.at(place)
            with consensus(mesh, place) as outcome:
                batches = [batch for step in steps for batch in loader.step(step)]
                own = batch_digest(batches, mesh.grid)
                outcome.values = (digest_term(own, mesh.grid),)
            if outcome.stop:
                raise StopRequested
            check_same_batches(outcome.sums[0], own, mesh, place)
            local_tokens += sum(loss.num_tokens(batch) for batch in batches)
            found = executor.evaluate(batches, loss, collect_predictions)
            for _ in batches:
                after_microbatch()
            local_sum += sum(one.loss_sum for one in found)
            if collect_predictions and found:
                indices = [samples for step in steps for samples in loader.sampler.microbatches(step)]
                rows += _rows(indices, found, batches)
    loss_sum, num_tokens = mesh.sum_over_dp(local_sum, local_tokens)
    (loss_sum,) = mesh.sum_over_pp(loss_sum)
    predictions, labels = mesh.broadcast_object_over_pp(_gathered(rows, mesh)) if collect_predictions else (None, None)
    mean = loss_sum / num_tokens if num_tokens else float("nan")
    return EvaluationResult(mean, int(num_tokens), time.monotonic() - began, predictions, labels)


@contextmanager
def eval_mode(engine: Engine) -> Iterator[None]:
    """Without dropout, and at the end in training mode again."""
    engine.module.eval()
    try:
        yield
    finally:
        engine.module.train()


def _rows(
    indices: Sequence[Sequence[int]], found: Sequence[Evaluated], batches: Sequence[Batch]
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Number of each sample, its logits and its labels."""
    return [
        (index, one.logits[i], batch["labels"][i].cpu().numpy())
        for samples, one, batch in zip(indices, found, batches, strict=True)
        if one.logits is not None
        for i, index in enumerate(samples)
    ]


def _gathered(rows: list, mesh: Mesh) -> tuple[np.ndarray, np.ndarray] | None:
    """Logits and labels of every data rank; None on a stage that has none."""
    everyone = sorted((row for part in mesh.gather_over_dp(rows) for row in part), key=lambda row: row[0])
    if not everyone:
        return None
    return _padded([row[1] for row in everyone]), _padded([row[2] for row in everyone])


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    shape = np.max([a.shape for a in arrays], axis=0)
    out = np.full((len(arrays), *shape), IGNORE_INDEX, dtype=arrays[0].dtype)
    for i, array in enumerate(arrays):
        # `...` makes an array even of one number, the label of a whole sample.
        out[i, ...][tuple(slice(n) for n in array.shape)] = array
    return out


def prediction_metrics(result: EvaluationResult, compute_metrics: Callable | None) -> dict[str, float]:
    """What the user's `compute_metrics(EvalPrediction)` returns for a pass; empty without one."""
    if compute_metrics is None or result.predictions is None or result.label_ids is None:
        return {}
    from transformers import EvalPrediction

    return dict(compute_metrics(EvalPrediction(predictions=result.predictions, label_ids=result.label_ids)))
