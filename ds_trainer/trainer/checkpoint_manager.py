"""Decides when a run is saved, what a failed save leads to, and which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_trainer.callbacks.best_metric import is_better, metric_value
from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint.folder import folder_of, rotate
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import MachineError
from ds_trainer.log import get_logger, rank
from ds_trainer.metrics import EvalMetrics


class CheckpointManager:
    """Saves by the config's rules. Every rank has one and calls the same methods in the same order.

    Args:
        config: The run's config.
        state: The run's progress; best metric and best checkpoint are set in it.
        save: Saves a checkpoint of this very step and returns its folder; a collective.

    Attributes:
        saved_step: Step of the last checkpoint, saved or resumed from.
    """

    def __init__(self, config: RunConfig, state: TrainerState, save: Callable[[], Path]) -> None:
        self._config, self._state, self._save = config, state, save
        self._output_dir = Path(config.run.output_dir)
        self.saved_step: int | None = None

    def saves_left(self) -> int:
        """Saves that are due in the rest of the run, without those of best models and of callbacks' requests."""
        every, done, last = self._config.checkpoint.every_steps, self._state.global_step, self._state.max_steps
        if not 0 < every <= last or done == last:
            return 0
        return last // every - done // every + (last % every > 0)

    def after_step(self, requested: bool) -> None:
        """Saves if the step is one of every `checkpoint.every_steps`, or a callback requests it."""
        every = self._config.checkpoint.every_steps
        if requested or (every and self._state.global_step % every == 0):
            self.save_once()

    def at_end(self) -> None:
        """Saves the last step of a run that is at least `checkpoint.every_steps` long."""
        if 0 < self._config.checkpoint.every_steps <= self._state.global_step:
            self.save_once()

    def at_stop(self) -> None:
        """Saves the last step of a stopped run, unless it has been saved.

        Raises:
            MachineError: It cannot be saved; `checkpoint.on_save_error` does not apply, since the run ends.
        """
        if self._state.global_step not in (0, self.saved_step):
            self.save()

    def after_evaluation(self, metrics: EvalMetrics) -> None:
        """Saves this step as the best one if its metric is the best so far."""
        state, evaluation = self._state, self._config.evaluation
        if evaluation.metric_for_best_model is None or state.global_step == 0:
            return
        value = metric_value(metrics, evaluation.metric_for_best_model)
        if not is_better(value, state.best_metric, bool(evaluation.greater_is_better)):
            return
        before = (state.best_metric, state.best_global_step, state.best_model_checkpoint)
        folder = folder_of(self._output_dir, state.global_step)
        state.best_metric, state.best_global_step, state.best_model_checkpoint = value, state.global_step, str(folder)
        if not self.save_once():
            state.best_metric, state.best_global_step, state.best_model_checkpoint = before

    def save(self) -> Path:
        """Saves, and removes checkpoints beyond `checkpoint.keep_last`.

        Raises:
            MachineError: On every rank, if one could not write.
        """
        folder = self._save()
        self.saved_step = self._state.global_step
        if rank() == 0:
            self._rotate()
        return folder

    def save_once(self) -> bool:
        """Saves this step unless it has been saved.

        Returns:
            Whether it is saved; False: it cannot be, and `checkpoint.on_save_error` is to go on.

        Raises:
            MachineError: It cannot be saved, and `checkpoint.on_save_error` is stop.
        """
        if self.saved_step == self._state.global_step:
            return True
        try:
            self.save()
        except MachineError as error:
            if self._config.checkpoint.on_save_error == "stop":
                raise
            get_logger().warning("warning: the run goes on without this checkpoint: %s", error)
            return False
        return True

    def _rotate(self) -> None:
        best = self._state.best_model_checkpoint
        try:
            rotate(self._output_dir, self._config.checkpoint.keep_last, keep=Path(best).name if best else None)
        except OSError as error:
            get_logger().warning("warning: an old checkpoint cannot be removed: %s", error)
