"""The callbacks that print, write and draw a run."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.progress import Progress
from ds_trainer.callbacks.view import TrainerView
from ds_trainer.log import get_logger, warn_once
from ds_trainer.metrics import EvalMetrics, MetricsWriter, StepMetrics
from ds_trainer.run_folder import METRICS


class MetricsCallback(Callback):
    """Appends every logged line and every evaluation to `<output_dir>/metrics.jsonl`, on rank 0.

    Args:
        path: File to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: MetricsWriter | None = None
        self._lacks_lines = False

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Opens the file; that of a resumed run begins with the lines up to its checkpoint."""
        self._writer = MetricsWriter(self._path, trainer.state.log_history)

    def on_log(self, trainer: TrainerView, metrics: StepMetrics) -> None:
        """Writes a training line."""
        self._write(trainer, metrics)

    def on_evaluate(self, trainer: TrainerView, metrics: EvalMetrics) -> None:
        """Writes an evaluation line, if it belongs to a training run."""
        self._write(trainer, metrics)

    def on_train_end(self, trainer: TrainerView) -> None:
        """Writes lines that could not be written before, to a full disk for example."""
        if self._lacks_lines:
            self._write(trainer, None)

    def _write(self, trainer: TrainerView, metrics: StepMetrics | EvalMetrics | None) -> None:
        """Writes a line, or all of them after a failure, which does not end the run."""
        if self._writer is None:
            return
        try:
            if self._lacks_lines or metrics is None:
                self._writer.close()
                self._writer = MetricsWriter(self._path, trainer.state.log_history)
                self._lacks_lines = False
            else:
                self._writer.write(metrics)
        except OSError as error:
            self._lacks_lines = True
            warn_once(f"{self._path} cannot be written ({error}): its lines follow when it can be written again")

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ProgressCallback(Callback):
    """One progress bar, and a line for each evaluation and checkpoint, on rank 0.

    Args:
        show_bar: False: a line for every logging window instead.
    """

    def __init__(self, show_bar: bool) -> None:
        self._show_bar = show_bar
        self._progress: Progress | None = None

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Starts the bar, at the checkpoint's step where the run is resumed."""
        state = trainer.state
        self._progress = Progress(state.max_steps, bar=self._show_bar, first_step=state.global_step)
        self._progress.__enter__()

    def on_step_end(self, trainer: TrainerView) -> None:
        """Moves the bar, if the step belongs to a training run."""
        if self._progress is not None:
            self._progress.step()

    def on_log(self, trainer: TrainerView, metrics: StepMetrics) -> None:
        """Shows the window's numbers."""
        if self._progress is not None:
            self._progress.show(metrics)

    def on_evaluate(self, trainer: TrainerView, metrics: EvalMetrics) -> None:
        """Prints the loss of an evaluation."""
        extra = "".join(f"  {name} {value:.4g}" for name, value in metrics.extra.items())
        get_logger().info("step %d: eval loss %.4f%s", metrics.step, metrics.eval_loss, extra)

    def on_save(self, trainer: TrainerView, folder: Path) -> None:
        """Prints where a checkpoint is."""
        get_logger().info("step %d: checkpoint %s", trainer.state.global_step, folder)

    def on_train_end(self, trainer: TrainerView) -> None:
        """Prints what the run took, and where its metrics are."""
        if self._progress is not None:
            get_logger().info(self._progress.total(trainer.state.global_step))
            get_logger().info("metrics: %s", Path(trainer.config.run.output_dir) / METRICS)

    def close(self) -> None:
        """Ends the bar."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None


class PlotCallback(Callback):
    """Draws the run's pictures into the output folder when the training ends without an error, on rank 0.

    Not after an error: a launcher would kill this rank while it draws, before it has reported the error.

    Args:
        metrics_path: The run's metrics file.
        folder: Folder of the pictures.
    """

    def __init__(self, metrics_path: Path, folder: Path) -> None:
        self._metrics_path = metrics_path
        self._folder = folder

    def on_train_end(self, trainer: TrainerView) -> None:
        """Draws."""
        self._draw()

    def on_interrupt(self, trainer: TrainerView) -> None:
        """Draws."""
        self._draw()

    def _draw(self) -> None:
        from ds_trainer.plots import plot_run

        try:
            for path in plot_run(self._metrics_path, self._folder):
                get_logger().info("picture: %s", path)
        except OSError as error:
            get_logger().warning("warning: no picture: %s", error)
