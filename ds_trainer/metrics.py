"""What one line of `metrics.jsonl` holds, and how a logging window becomes such a line. Pure.

A run's file has two kinds of lines: training lines carry the keys of `StepMetrics`, evaluation lines those of
`EvalMetrics`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from errno import ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any

from ds_trainer.files import replace_text

HF_NAMES = {"lr": "learning_rate", "eval_s": "eval_runtime"}
"""Values that transformers logs under another name."""


class Metrics(Mapping[str, Any]):
    """A line of metrics, which can be read as a dict too, under its own names and those of transformers."""

    def _values(self) -> dict[str, Any]:
        line = dict(vars(self))
        line |= line.pop("extra", {})
        return line | {theirs: line[ours] for ours, theirs in HF_NAMES.items() if ours in line}

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


@dataclass(frozen=True)
class StepMetrics(Metrics):
    """One logging window: the optimizer steps since the line before.

    Args:
        step: Optimizer steps taken so far.
        epoch: Passes over the training data so far, with a fraction.
        loss: Token mean of the loss over every rank and step of the window; None when no step had a label token.
        lr: Learning rate of the last step.
        grad_norm: Global gradient norm of the last step, before clipping.
        num_tokens: Label tokens of the window, over all ranks.
        tokens: Tokens of the window that are not padding, over all ranks.
        tokens_per_s: `tokens` per second of wall time, over all ranks.
        samples_per_s: Samples per second of wall time, over all ranks.
        step_s: Mean wall time of a step, the wait for data included.
        input_wait_s: Mean wall time that a step waited for data.
        skipped: Steps of the window that updated nothing because loss or gradient was not finite.
        memory_bytes: Peak memory of this rank's device; of this process where the device is the CPU.
    """

    step: int
    epoch: float
    loss: float | None
    lr: float
    grad_norm: float
    num_tokens: int
    tokens: int
    tokens_per_s: float
    samples_per_s: float
    step_s: float
    input_wait_s: float
    skipped: int
    memory_bytes: int


@dataclass(frozen=True)
class EvalMetrics(Metrics):
    """One pass over the evaluation data.

    Args:
        step: Optimizer steps taken before it; 0 for the evaluation at the start.
        eval_loss: Token mean of the loss over the whole evaluation data.
        eval_num_tokens: Label tokens in the evaluation data.
        eval_s: Wall time of the pass.
        extra: Further metrics by name, as `compute_metrics` returned them.
    """

    step: int
    eval_loss: float
    eval_num_tokens: int
    eval_s: float
    extra: dict[str, float]

    def named(self, prefix: str) -> dict[str, float]:
        """Loss and further metrics, their names beginning with `prefix` instead of `eval`."""
        found = {"eval_loss": self.eval_loss, **self.extra}
        return {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in found.items()}


def to_line(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    """One line of the file; a number that is not finite, which JSON lacks, becomes null."""
    line = asdict(metrics)
    line |= line.pop("extra", {})
    return {key: _finite(value) for key, value in line.items()}


def from_line(line: dict[str, Any]) -> StepMetrics | EvalMetrics:
    """The metrics that `to_line` was given."""
    if "eval_loss" not in line:
        return StepMetrics(**line)
    values: dict[str, Any] = {key: math.nan if value is None else value for key, value in line.items()}
    own = {field.name: values.pop(field.name) for field in fields(EvalMetrics) if field.name != "extra"}
    return EvalMetrics(**own, extra=values)


class WindowMean:
    """Gathers the steps of one logging window.

    The loss is weighted by label tokens: in a mean of the steps' means a short step would weigh as much as a long one.

    Example:
        >>> window = WindowMean()
        >>> window.add(loss_sum=30.0, num_tokens=10, tokens=20, samples=4, step_s=1.0, input_wait_s=0.1)
        >>> window.add(loss_sum=10.0, num_tokens=10, tokens=20, samples=4, step_s=1.0, input_wait_s=0.1)
        >>> window.take(step=2, epoch=0.5, lr=1e-4, grad_norm=0.7, memory_bytes=0).loss
        2.0
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._steps = self._skipped = self._num_tokens = self._tokens = self._samples = 0
        self._loss_sum = self._step_s = self._input_wait_s = 0.0

    def state_dict(self) -> dict[str, float]:
        """The sums so far, for a checkpoint in the middle of a window."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Sets what `state_dict` returned."""
        vars(self).update(state)

    def add(
        self,
        *,
        loss_sum: float,
        num_tokens: int,
        tokens: int,
        samples: int,
        step_s: float,
        input_wait_s: float,
        skipped: bool = False,
    ) -> None:
        """Adds one optimizer step; every count and sum is that of all ranks together.

        A skipped step counts in the throughput and in `skipped`; its loss, which may be NaN, stays out of the mean.
        """
        self._steps += 1
        self._tokens += tokens
        self._samples += samples
        self._step_s += step_s
        self._input_wait_s += input_wait_s
        if skipped:
            self._skipped += 1
        else:
            self._loss_sum += loss_sum
            self._num_tokens += num_tokens

    def take(self, *, step: int, epoch: float, lr: float, grad_norm: float, memory_bytes: int) -> StepMetrics:
        """Closes the window and starts the next one; at least one step must have been added."""
        metrics = StepMetrics(
            step=step,
            epoch=epoch,
            loss=self._loss_sum / self._num_tokens if self._num_tokens else None,
            lr=lr,
            grad_norm=grad_norm,
            num_tokens=self._num_tokens,
            tokens=self._tokens,
            tokens_per_s=self._tokens / self._step_s,
            samples_per_s=self._samples / self._step_s,
            step_s=self._step_s / self._steps,
            input_wait_s=self._input_wait_s / self._steps,
            skipped=self._skipped,
            memory_bytes=memory_bytes,
        )
        self._reset()
        return metrics


class MetricsWriter:
    """Writes a run's metrics as JSON lines, each passed to the operating system before the next step begins.

    Args:
        path: File to write; one left by an earlier run is replaced.
        history: Metrics to begin with, of a run that is resumed.
    """

    def __init__(self, path: Path, history: Iterable[StepMetrics | EvalMetrics] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "".join(map(_as_text, history)))
        # Unbuffered: a full disk has to show at this line, not at a later one or at the end.
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Appends one line.

        Raises:
            OSError: The disk is full.
        """
        line = _as_text(metrics).encode()
        if self._file.write(line) < len(line):
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_text(metrics: StepMetrics | EvalMetrics) -> str:
    return json.dumps(to_line(metrics), allow_nan=False) + "\n"


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
