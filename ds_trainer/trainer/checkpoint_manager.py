"""Decides when a run is saved, what a failed save leads to, and which checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.best_metric import is_better, metric_value
from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint.folder import folder_of, rotate
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import CheckpointError, DesyncError, MachineError, UserError
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

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the best model: where it is, seen from the output folder."""
        best = self._state.best_model_checkpoint
        return {"best_model_checkpoint": best and os.path.relpath(best, self._output_dir)}

    def resumed(self, folder: Path) -> None:
        """Goes on from a checkpoint, once the state has been loaded from it; its output folder may have been moved.

        Args:
            folder: The checkpoint.

        Raises:
            CheckpointError: The best model is to be loaded at the end, and its checkpoint is not there.
        """
        self.saved_step = self._state.global_step
        if self._state.best_model_checkpoint is None:
            return
        best = Path(os.path.normpath(folder.parent / self._state.best_model_checkpoint))
        self._state.best_model_checkpoint = str(best)
        if self._config.checkpoint.load_best_model_at_end and not best.is_dir():
            raise CheckpointError(
                f"the best model so far is that of step {self._state.best_global_step}, and {best} is not there",
                "checkpoint.load_best_model_at_end reads it at the end; it is looked for beside the checkpoint that a "
                "run goes on from, or where it was seen from there",
                "move it there, or set checkpoint.load_best_model_at_end to false",
            )

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

    def at_end(self, save_model: Callable[[], object]) -> None:
        """Saves the last step of a run that is `checkpoint.every_steps` long, and exports it if not the best one.

        Args:
            save_model: Writes the export; a collective.

        Raises:
            UserError: It cannot be written; the step is saved, whatever the run's length, and the text says how to
                export from there.
        """
        if 0 < self._config.checkpoint.every_steps <= self._state.global_step:
            self.save_once()
        if not self._config.checkpoint.load_best_model_at_end:
            self._export(save_model)

    def export_best(self, load_best: Callable[[], None], save_model: Callable[[], object]) -> None:
        """Puts the best model in memory and exports it, where `checkpoint.load_best_model_at_end` is on.

        Args:
            load_best: Puts it in memory; a collective.
            save_model: As in `at_end`.

        Raises:
            UserError: As in `at_end`.
        """
        if self._config.checkpoint.load_best_model_at_end:
            load_best()
            self._export(save_model)

    def _export(self, save_model: Callable[[], object]) -> None:
        if not self._config.checkpoint.export:
            return
        try:
            save_model()
        except UserError as error:
            if error.on_all_ranks and not isinstance(error, DesyncError):
                error.add_note(self._way_to_the_model())
            raise

    def _way_to_the_model(self) -> str:
        best = self._state.best_model_checkpoint if self._config.checkpoint.load_best_model_at_end else None
        folder = folder_of(self._output_dir, self._state.global_step) if best is None else Path(best)
        if best is None and self.saved_step != self._state.global_step:
            try:
                self.save()
            except MachineError as error:
                return f"nor can a checkpoint of this step be saved: {error.found}"
        if self._config.model.path is None:
            way = f"the same script with checkpoint.resume = {folder} exports it again"
        else:
            way = f"ds-trainer export {folder} --out FOLDER"
        return f"saved:  {folder} holds the trained weights: {way}"

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
