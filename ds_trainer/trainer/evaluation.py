"""One pass over a data set without updates: the token mean of the loss, and predictions if requested."""

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
from ds_trainer.executors.base import Evaluated
from ds_trainer.executors.step import check_labels
from ds_trainer.launch.signals import StopRequested
from ds_trainer.loss import IGNORE_INDEX, Batch, LossFunction, with_logits
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.trainer.run import Run


@dataclass(frozen=True)
class EvaluationResult:
    """The results of a pass, the same on every rank.

    Args:
        loss: Token mean over the data set; nan where it has no label token.
        num_tokens: Label tokens of the data set.
        seconds: Wall time.
        predictions: Logits by sample, padded with -100 on the right; None unless requested.
        label_ids: Labels by sample, padded with -100; None unless requested.
    """

    loss: float
    num_tokens: int
    seconds: float
    predictions: np.ndarray | None = None
    label_ids: np.ndarray | None = None


def run_evaluation(
    run: Run, loader: BatchLoader, collect_predictions: bool, after_microbatch: Callable[[], None]
) -> EvaluationResult:
    """Runs a data set once, in constant memory unless predictions are collected.

    Every rank runs the same number of forward passes, fillers included, since ZeRO-3 gathers parameters in each.

    Args:
        run: Its model, executor and loss.
        loader: The data set.
        collect_predictions: Whether logits and labels are wanted.
        after_microbatch: Called for every micro-batch that has been evaluated.

    Comm: a broadcast of each persistent buffer over the data-parallel ranks; a consensus of all ranks per global batch,
        or of a pipeline per some of them, that all have their samples; one all-reduce of two numbers over the
        data-parallel ranks; with predictions, one gather of them at the end; of a pipeline the same from its last stage
        to the others.

    Raises:
        UserError: A rank's samples are wrong; on every rank.
        StopRequested: A signal requests the end of the run.
    """
    mesh, executor, engine = run.mesh, run.executor, run.engine
    loss = with_logits(run.loss) if collect_predictions else run.loss
    # Each rank has running statistics of its samples only. Those of the first rank are evaluated and exported.
    mesh.broadcast_over_dp(buffer for _, buffer in persistent_buffers(run.model))
    began = time.monotonic()
    local_sum, local_tokens = 0.0, 0
    rows: list[tuple[int, np.ndarray, np.ndarray]] = []
    num_steps = loader.sampler.steps_per_epoch
    with closing(loader), eval_mode(engine), torch.no_grad():
        for first in range(0, num_steps, executor.at_once):
            steps = range(first, min(first + executor.at_once, num_steps))
            samples = [of_batch for step in steps for of_batch in loader.sampler.microbatches(step)]
            batches = _read(loader, steps, samples, loss, mesh)
            local_tokens += sum(loss.num_tokens(batch) for batch in batches)
            found = executor.evaluate(batches, loss, collect_predictions)
            for _ in batches:
                after_microbatch()
            local_sum += sum(one.loss_sum for one in found)
            if collect_predictions and found:
                rows += _rows(samples, found, batches)
    loss_sum, num_tokens = mesh.sum_over_dp(local_sum, local_tokens)
    (loss_sum,) = mesh.sum_over_pp(loss_sum)
    predictions, labels = mesh.broadcast_object_over_pp(_gathered(rows, mesh)) if collect_predictions else (None, None)
    mean = loss_sum / num_tokens if num_tokens else float("nan")
    return EvaluationResult(mean, int(num_tokens), time.monotonic() - began, predictions, labels)


def _read(
    loader: BatchLoader, steps: range, samples: Sequence[Sequence[int]], loss: LossFunction, mesh: Mesh
) -> list[Batch]:
    """This rank's micro-batches of some global batches, once all ranks have theirs.

    Raises:
        UserError: A rank's samples are wrong, or ranks that share samples have different ones; on every rank.
        StopRequested: A signal requests the end of the run.
    """
    place = f"batch {steps.start + 1} of the evaluation"
    mesh.monitor.at(place)
    with consensus(mesh, place) as outcome:
        batches: list[Batch] = [batch for step in steps for batch in loader.step(step)]
        check_labels(batches, samples, loss)
        digest = batch_digest(batches, mesh.grid)
        outcome.values = (digest_term(digest, mesh.grid),)
    if outcome.stop:
        raise StopRequested
    check_same_batches(outcome.sums[0], digest, mesh, place)
    return batches


@contextmanager
def eval_mode(engine: Engine) -> Iterator[None]:
    """The model in evaluation mode, without dropout; afterwards in training mode."""
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
    """Logits and labels of every data-parallel rank; None on a stage that has none."""
    gathered = sorted((row for of_rank in mesh.gather_over_dp(rows) for row in of_rank), key=lambda row: row[0])
    if not gathered:
        return None
    return _padded([row[1] for row in gathered]), _padded([row[2] for row in gathered])


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    shape = np.max([a.shape for a in arrays], axis=0)
    out = np.full((len(arrays), *shape), IGNORE_INDEX, dtype=arrays[0].dtype)
    for i, array in enumerate(arrays):
        # `...` makes an array even of a single number, such as the label of a sequence classifier.
        out[i, ...][tuple(slice(n) for n in array.shape)] = array
    return out


def prediction_metrics(result: EvaluationResult, compute_metrics: Callable | None, prefix: str) -> dict[str, float]:
    """What the user's `compute_metrics(EvalPrediction)` returns, as `<prefix>_<name>`; empty without one."""
    if compute_metrics is None or result.predictions is None or result.label_ids is None:
        return {}
    from transformers import EvalPrediction

    found = compute_metrics(EvalPrediction(predictions=result.predictions, label_ids=result.label_ids))
    return {f"{prefix}_{name}": float(value) for name, value in found.items()}
