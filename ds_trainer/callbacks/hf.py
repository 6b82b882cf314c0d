"""Runs transformers' `TrainerCallback` objects in this Trainer, for events that both trainers have.

They get transformers' own `TrainerState` and `TrainerControl`, and as `args` those of `TrainingArguments` that have an
equal in the config. What differs:

- `model` is the bare module; under ZeRO-3 its parameters are empty outside of forward and backward passes.
- `optimizer` has `param_groups` only; states are sharded differently on every engine.
- `train_dataloader` and `eval_dataloader` are a `BatchLoader`, which is not a torch `DataLoader`.
- At `on_pre_optimizer_step` gradients are not clipped yet; on DeepSpeed they are not in `.grad`.
- `control` shows what callbacks request. What is due by the config is not shown and cannot be cancelled.
- There is no last `on_log` with the run's totals, and `num_input_tokens_seen` and `total_flos` stay 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.hf_arguments import Arguments
from ds_trainer.callbacks.hf_logs import hf_logs
from ds_trainer.callbacks.view import TrainerView
from ds_trainer.errors import ConfigError
from ds_trainer.metrics import EvalMetrics, StepMetrics

if TYPE_CHECKING:
    from transformers import TrainerCallback


_FLAGS = ("should_training_stop", "should_save", "should_evaluate", "should_log")
_SAME = ("global_step", "epoch", "best_metric", "best_global_step", "best_model_checkpoint")


def adapted(callbacks: Sequence[Any]) -> list[Callback]:
    """Callbacks of this package as they are, and after them one that runs all of transformers'.

    Args:
        callbacks: Objects of either kind, or classes of transformers' kind.

    Raises:
        ConfigError: An object is of neither kind, or overrides an event that does not exist here.
    """
    native = [callback for callback in callbacks if isinstance(callback, Callback)]
    others = [callback for callback in callbacks if not isinstance(callback, Callback)]
    if not others:
        return native
    from transformers import TrainerCallback

    others = [callback() if isinstance(callback, type) else callback for callback in others]
    unknown = [type(callback).__name__ for callback in others if not isinstance(callback, TrainerCallback)]
    if unknown:
        raise ConfigError(
            f"callbacks holds {', '.join(unknown)}",
            "a callback is a ds_trainer.Callback or a transformers.TrainerCallback",
            "subclass one of them",
        )
    for callback in others:
        _check_events(callback, TrainerCallback)
    return [*native, HFCallbacks(others)]


def take_out(callbacks: list[Callback], wanted: Any) -> Any:
    """Removes one callback of either kind from a list that `adapted` returned, and returns it; None: it is not there.

    Args:
        callbacks: The callbacks.
        wanted: A callback, or a class, of which the first one is removed.
    """
    holders: list[list] = [callbacks, *(one.callbacks for one in callbacks if isinstance(one, HFCallbacks))]
    for holder in holders:
        for callback in holder:
            if callback is wanted or (isinstance(wanted, type) and isinstance(callback, wanted)):
                holder.remove(callback)
                return callback
    return None


def _check_events(callback: TrainerCallback, base: type) -> None:
    absent = [name for name in vars(base) if name.startswith("on_") and not hasattr(Callback, name)]
    overridden = [name for name in absent if getattr(type(callback), name) is not getattr(base, name)]
    if overridden:
        raise ConfigError(
            f"callbacks holds {type(callback).__name__}, which overrides {', '.join(overridden)}",
            f"{', '.join(absent)} would never be called: engines have no hook for these events",
            f"move what {', '.join(overridden)} does to another method, such as on_pre_optimizer_step or on_step_end",
        )


class HFCallbacks(Callback):
    """Calls transformers' callbacks in their order, on every rank.

    Args:
        callbacks: The callbacks.

    Attributes:
        callbacks: They, in their order.
    """

    def __init__(self, callbacks: Sequence[TrainerCallback]) -> None:
        from transformers import TrainerControl, TrainerState

        self.callbacks = list(callbacks)
        self._state, self._control = TrainerState(), TrainerControl()

    def on_init_end(self, trainer: TrainerView) -> None:
        """Calls their `on_init_end`."""
        config, grid, loader = trainer.config, trainer.run.mesh.grid, trainer.run.train_loader
        max_steps = trainer.state.max_steps
        num_epochs = math.ceil(loader.sampler.epochs_before(max_steps)) if loader is not None else 0
        self._args = Arguments(config, grid, max_steps, num_epochs)
        state = self._state
        state.max_steps, state.num_train_epochs = max_steps, num_epochs
        state.logging_steps, state.save_steps = config.logging.every_steps, config.checkpoint.every_steps
        state.eval_steps = config.evaluation.every_steps or 0
        state.train_batch_size = config.batch.micro_size
        state.is_local_process_zero, state.is_world_process_zero = grid.local_rank == 0, grid.rank == 0
        self._call(trainer, "on_init_end")

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Calls their `on_train_begin`."""
        self._call(trainer, "on_train_begin")

    def on_epoch_begin(self, trainer: TrainerView) -> None:
        """Calls their `on_epoch_begin`."""
        self._call(trainer, "on_epoch_begin")

    def on_step_begin(self, trainer: TrainerView) -> None:
        """Calls their `on_step_begin`."""
        self._call(trainer, "on_step_begin")

    def on_pre_optimizer_step(self, trainer: TrainerView) -> None:
        """Calls their `on_pre_optimizer_step`."""
        self._call(trainer, "on_pre_optimizer_step")

    def on_step_end(self, trainer: TrainerView) -> None:
        """Calls their `on_step_end`."""
        self._call(trainer, "on_step_end")

    def on_log(self, trainer: TrainerView, metrics: StepMetrics) -> None:
        """Calls their `on_log`."""
        self._call(trainer, "on_log", logs=hf_logs(metrics))

    def on_prediction_step(self, trainer: TrainerView) -> None:
        """Calls their `on_prediction_step`."""
        self._call(trainer, "on_prediction_step")

    def on_evaluate(self, trainer: TrainerView, metrics: EvalMetrics) -> None:
        """Calls their `on_log` and then `on_evaluate`."""
        logs = hf_logs(metrics) | {"epoch": trainer.state.epoch}
        self._call(trainer, "on_log", logs=logs)
        self._call(trainer, "on_evaluate", metrics=logs)

    def on_predict(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        """Calls their `on_predict`."""
        self._call(trainer, "on_predict", metrics=metrics)

    def on_save(self, trainer: TrainerView, folder: Path) -> None:
        """Calls their `on_save`."""
        self._call(trainer, "on_save")

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Calls their `on_epoch_end`."""
        self._call(trainer, "on_epoch_end")

    def on_train_end(self, trainer: TrainerView) -> None:
        """Calls their `on_train_end`."""
        self._call(trainer, "on_train_end")

    def _call(self, trainer: TrainerView, event: str, **given: Any) -> None:
        """Calls one method of every callback.

        Args:
            trainer: The trainer.
            event: The method.
            given: Further arguments of this event.

        Raises:
            ConfigError: A callback requests the end of the epoch.
        """
        self._update_state(trainer)
        for flag in _FLAGS:
            setattr(self._control, flag, getattr(trainer.control, flag))
        run = trainer.run
        given |= {
            "model": run.model,
            "processing_class": run.tokenizer,
            "optimizer": SimpleNamespace(param_groups=trainer.engine.param_groups()),
            "lr_scheduler": trainer.lr_scheduler,
            "train_dataloader": run.train_loader,
            "eval_dataloader": run.eval_loader,
        }
        for callback in self.callbacks:
            self._control = getattr(callback, event)(self._args, self._state, self._control, **given) or self._control
            if self._control.should_epoch_stop:
                raise ConfigError(
                    f"{type(callback).__name__} sets control.should_epoch_stop",
                    "an epoch is trained to its end: each sample is seen once in it",
                    "set control.should_training_stop, or remove the callback",
                )
        for flag in _FLAGS:
            setattr(trainer.control, flag, getattr(self._control, flag))

    def _update_state(self, trainer: TrainerView) -> None:
        ours, theirs = trainer.state, self._state
        for name in _SAME:
            setattr(theirs, name, getattr(ours, name))
        for metrics in ours.log_history[len(theirs.log_history) :]:
            epoch = {"epoch": ours.epoch} if metrics.step == ours.global_step else {}
            theirs.log_history.append(epoch | hf_logs(metrics) | {"step": metrics.step})

    def state_dict(self) -> dict[str, Any]:
        """Class name -> states of those callbacks that export theirs."""
        from transformers.trainer_callback import ExportableState

        states: dict[str, list[dict]] = {}
        for callback in self.callbacks:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets their saved attributes; what their constructors were given this time stays."""
        for name, states in state.items():
            same = [callback for callback in self.callbacks if type(callback).__name__ == name]
            for callback, saved in zip(same, states, strict=False):
                vars(callback).update(saved["attributes"])
