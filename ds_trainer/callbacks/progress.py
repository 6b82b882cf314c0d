"""One progress bar on rank 0; without a terminal, a plain line for every logging window instead."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from math import isfinite
from types import TracebackType

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ds_trainer.log import get_logger
from ds_trainer.metrics import StepMetrics


def summary(metrics: StepMetrics) -> str:
    """The numbers of one logging window on one line."""
    loss = "-" if metrics.loss is None else f"{metrics.loss:.4f}"
    parts = [
        f"loss {loss}",
        f"lr {metrics.lr:.2e}",
        f"grad norm {f'{metrics.grad_norm:.3g}' if isfinite(metrics.grad_norm) else 'not finite'}",
        f"{metrics.tokens_per_s:,.0f} tok/s",
        f"input wait {metrics.input_wait_s / metrics.step_s:.0%}",
        f"{metrics.memory_bytes / 1e9:.1f} GB",
    ]
    if metrics.skipped:
        parts.append(f"skipped {metrics.skipped}")
    return "  ".join(parts)


class Progress:
    """Shows the progress of a run. Use as a context manager: log lines are then written above the bar.

    Args:
        total_steps: Optimizer steps of the run.
        bar: Whether a bar is wanted; without one, and without a terminal, every logging window is a line.
        first_step: Steps of the run that this one resumes; the remaining time ignores them.
    """

    def __init__(self, total_steps: int, bar: bool, first_step: int = 0) -> None:
        self._total, self._first = total_steps, first_step
        self._plain = not bar or not sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps,
            initial=first_step,
            disable=self._plain,
            unit="step",
            bar_format="{desc}{percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {postfix}",
            dynamic_ncols=True,
        )
        self._started = time.monotonic()
        self._tokens = 0
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        self._stack.enter_context(self._bar)
        if not self._bar.disable:
            self._stack.enter_context(logging_redirect_tqdm([get_logger()]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def step(self) -> None:
        """Counts one optimizer step."""
        self._bar.update()

    def show(self, metrics: StepMetrics) -> None:
        """Shows the numbers of the last logging window."""
        self._tokens += metrics.tokens
        self._bar.set_postfix_str(summary(metrics))
        if self._plain:
            elapsed = time.monotonic() - self._started
            remaining = elapsed / (metrics.step - self._first) * (self._total - metrics.step)
            clock = f"{tqdm.format_interval(elapsed)}<{tqdm.format_interval(remaining)}"
            get_logger().info("step %d/%d [%s]  %s", metrics.step, self._total, clock, summary(metrics))

    def total(self, step: int) -> str:
        """Steps, time and throughput of this process's part of the run, up to a step; logged windows count."""
        elapsed = max(time.monotonic() - self._started, 1e-3)
        return (
            f"{step - self._first} steps in {tqdm.format_interval(elapsed)}, evaluations and saves included: "
            f"{self._tokens / elapsed:,.0f} tok/s on average"
        )
