"""One pass over a data set without updates: the token mean of the loss, and predictions where they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_trainer.data import model_group
from ds_trainer.data.loader import BatchLoader
from ds_trainer.engines.base import Engine
from ds_trainer.executors.accumulate import to_device
from ds_trainer.loss import IGNORE_INDEX, LossFunction, with_logits
from ds_trainer.mesh.agree import agreed
from ds_trainer.mesh.mesh import Mesh
from ds_trainer.mesh.signals import StopRequested


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
    loss: LossFunction,
    mesh: Mesh,
    collect_predictions: bool = False,
    after_forward: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Runs the whole data set once, in constant memory unless predictions are collected.

    Every rank runs the same number of forward passes, fillers included, since ZeRO-3 gathers parameters in each.

    Args:
        loader: The data set.
        engine: Runs the model.
        loss: Sums the losses.
        mesh: Process groups.
        collect_predictions: Whether logits and labels are wanted.
        after_forward: Called after every forward pass.

    Comm: over the data ranks, an agreement per global batch that all have their samples, and one all-reduce of two
        numbers; with predictions, one gather of them at the end.

    Raises:
        UserError: A rank's samples are wrong; on every rank, in its words.
        StopRequested: A signal asks for the end of the run.
    """
    began = time.monotonic()
    if collect_predictions:
        loss = with_logits(loss)
    local_sum, local_tokens = 0.0, 0
    rows: list[tuple[int, np.ndarray, np.ndarray]] = []
    with closing(loader), eval_mode(engine), torch.no_grad():
        for step in range(loader.sampler.steps_per_epoch):
            place = f"batch {step + 1} of the evaluation"
            mesh.monitor.at(place)
            with agreed(mesh, place) as agreement:
                batches = list(loader.step(step))
                own = model_group.digest(batches, mesh.grid)
                agreement.values = (model_group.difference(own, mesh.grid),)
            if agreement.stop:
                raise StopRequested
            model_group.require_same(agreement.sums[0], own, mesh, place)
            for indices, batch in zip(loader.sampler.microbatches(step), batches, strict=True):
                batch = to_device(batch, mesh.device)
                outputs = engine.forward(**loss.inputs(batch))
                after_forward()
                count = loss.num_tokens(batch)
                if count:
                    local_sum += float(loss.loss_sum(outputs, batch, count))
                    local_tokens += count
                if collect_predictions:
                    rows += _rows(indices, outputs, batch)
    loss_sum, num_tokens = mesh.sum(local_sum, local_tokens)
    predictions, labels = _gathered(rows, mesh) if collect_predictions else (None, None)
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


def _rows(indices: list[int], outputs: Any, batch: dict) -> list[tuple[int, np.ndarray, np.ndarray]]:
    logits, labels = outputs["logits"].float().cpu().numpy(), batch["labels"].cpu().numpy()
    return [(index, logits[i], labels[i]) for i, index in enumerate(indices)]


def _gathered(rows: list, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    everyone = sorted((row for part in mesh.gather_from_data_ranks(rows) for row in part), key=lambda row: row[0])
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
