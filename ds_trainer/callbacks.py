"""The callback protocol, named as transformers' `TrainerCallback`, and the built-in callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_trainer.log import get_logger
from ds_trainer.metrics import EvalMetrics, MetricsWriter, StepMetrics
from ds_trainer.progress import Progress

if TYPE_CHECKING:
    from ds_trainer.trainer import Trainer


class Callback:
    """Base class: every method does nothing. All ranks call every method; `trainer.control` takes what it asks for."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before a step's first forward pass."""

    def on_pre_optimizer_step(self, trainer: Trainer) -> None:
        """After the last backward pass, before clipping and the update; gradients are whole here."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After every optimizer step; `trainer.state` holds its loss and gradient norm."""

    def on_log(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """After every `logging.every_steps` steps, with the token-weighted loss of that window."""

    def on_evaluate(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """After an evaluation."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """After a checkpoint has been saved whole."""

    def on_epoch_begin(self, trainer: Trainer) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After the last step of an epoch."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step."""

    def close(self) -> None:
        """Releases what the callback holds, however the training ended."""


class MetricsCallback(Callback):
    """Appends every logged line and every evaluation to `<output_dir>/metrics.jsonl`, on rank 0.

    Args:
        path: File to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: MetricsWriter | None = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Opens the file."""
        self._writer = MetricsWriter(self._path)

    def on_log(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Writes a training line."""
        self._write(metrics)

    def on_evaluate(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """Writes an evaluation line, if it belongs to a training run."""
        self._write(metrics)

    def _write(self, metrics: StepMetrics | EvalMetrics) -> None:
        if self._writer is not None:
            self._writer.write(metrics)

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ProgressCallback(Callback):
    """One progress bar, and a line for each evaluation, on rank 0.

    Args:
        show_bar: False: evaluations only.
    """

    def __init__(self, show_bar: bool) -> None:
        self._show_bar = show_bar
        self._progress: Progress | None = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Starts the bar."""
        self._progress = Progress(trainer.state.max_steps, enabled=self._show_bar)
        self._progress.__enter__()

    def on_step_end(self, trainer: Trainer) -> None:
        """Moves the bar, if the step belongs to a training run."""
        if self._progress is not None:
            self._progress.step()

    def on_log(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Shows the window's numbers."""
        if self._progress is not None:
            self._progress.show(metrics)

    def on_evaluate(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """Prints the loss of an evaluation."""
        extra = "".join(f"  {name} {value:.4g}" for name, value in metrics.extra.items())
        get_logger().info("step %d: eval loss %.4f%s", metrics.step, metrics.eval_loss, extra)

    def close(self) -> None:
        """Ends the bar."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None


class PlotCallback(Callback):
    """Draws the run's pictures into the output folder at the end, on rank 0.

    Args:
        metrics_path: The run's metrics file.
        folder: Folder of the pictures.
    """

    def __init__(self, metrics_path: Path, folder: Path) -> None:
        self._metrics_path = metrics_path
        self._folder = folder

    def on_train_end(self, trainer: Trainer) -> None:
        """Draws."""
        from ds_trainer.plots import plot_run

        try:
            for path in plot_run(self._metrics_path, self._folder):
                get_logger().info("picture: %s", path)
        except OSError as error:
            get_logger().warning("warning: no picture: %s", error)
