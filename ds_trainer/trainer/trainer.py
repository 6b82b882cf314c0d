"""The Trainer: wires the parts of a run together and holds the loop. What differs between engines is not here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ds_trainer.callbacks.base import restore_states, states_of
from ds_trainer.callbacks.hf import adapted
from ds_trainer.callbacks.make import built_in_callbacks
from ds_trainer.callbacks.trainer_state import TrainerControl, TrainerState
from ds_trainer.checkpoint.disk_space import require_checkpoint_space
from ds_trainer.checkpoint.folder import STATE, remove_unfinished_saves
from ds_trainer.checkpoint.rng import set_rng_state
from ds_trainer.checkpoint.save import RankState
from ds_trainer.checkpoint.trial_save import trial_save
from ds_trainer.checkpoint.verified import VerifiedCheckpoint
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.distributed.memory import peak_memory_bytes
from ds_trainer.distributed.store_barrier import barrier_before_exit
from ds_trainer.engines.replica_check import check_replicas
from ds_trainer.errors import ConfigError, DsTrainerError, UserError, report_error
from ds_trainer.executors.step import StepLoss, run_step
from ds_trainer.launch import signals
from ds_trainer.launch.signals import StopRequested
from ds_trainer.log import get_logger, warn_once
from ds_trainer.metrics import EvalMetrics, WindowMean
from ds_trainer.optim import lr_factor
from ds_trainer.run_folder import claimed, set_aside_earlier_run
from ds_trainer.trainer.checkpoint_io import load_checkpoint, save_checkpoint
from ds_trainer.trainer.checkpoint_manager import CheckpointKeeper
from ds_trainer.trainer.inference import ModelCalls, guarded
from ds_trainer.trainer.inputs import ConfigSource, Ingredients, loaded_config
from ds_trainer.trainer.non_finite import NonFinitePolicy
from ds_trainer.trainer.resume_checks import check_length
from ds_trainer.trainer.setup import assemble

if TYPE_CHECKING:
    from transformers import TrainingArguments

_CHECKED_STEPS = 3
"""After so many first steps of a process tensor ranks are held to equal copies of what each of them holds whole."""


class Trainer(ModelCalls):
    """Trains a Hugging Face model by one config. Arguments are named as those of transformers' `Trainer`.

    Args:
        model: Folder or hub id of a checkpoint (then it replaces `model.path`), or a model instance.
        config: The run's JSON: a path, a dict, a `RunConfig`, or what `load_config` returned.
        args: `TrainingArguments` of transformers instead of a config; what they mean here is logged.
        train_dataset: Data set object, instead of `data.train`.
        eval_dataset: Data set object, instead of `data.eval`.
        processing_class: Tokenizer, instead of the checkpoint's.
        data_collator: Makes a batch of a list of samples; the data sets are then used as they are.
        compute_loss_func: `f(outputs, labels, num_items_in_batch=n)`: a sum of token losses divided by n, the label
            tokens of the whole step over all ranks.
        compute_metrics: `f(EvalPrediction) -> dict`, called on the predictions of a whole evaluation.
        callbacks: Callbacks of this package, and `TrainerCallback` objects or classes of transformers, beside the
            built-in ones.
        optimizers: Optimizer of your own, built on the model instance that is passed, and perhaps its LR scheduler,
            whose `step()` is called once per optimizer step. With None as the scheduler the config's schedule applies.

    Raises:
        UserError: Any fault of config, machine, data or model.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | None = None,
        config: ConfigSource | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[torch.optim.Optimizer | None, Any | None] = (None, None),
    ) -> None:
        callbacks = adapted(callbacks)
        run_config, origins = loaded_config(config, args, model, train_dataset)
        optimizer, self.lr_scheduler = optimizers
        self.optimizer_is_given = optimizer is not None
        given = Ingredients(
            model=model if isinstance(model, nn.Module) else None,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            optimizer=optimizer,
            scheduler=self.lr_scheduler,
        )
        with signals.listening():
            self.run = assemble(run_config, origins, given)
        self.config = self.run.resolved.config
        self.engine = self.run.engine
        self.is_world_process_zero = self.run.mesh.grid.rank == 0
        self.state = TrainerState(max_steps=self.planned_steps())
        self.callbacks = [*built_in_callbacks(self.config, self.is_world_process_zero), *callbacks]
        self.control = TrainerControl()
        self._compute_metrics = compute_metrics
        self._base_lrs = [group["lr"] for group in self.engine.param_groups()]
        self.window = WindowMean()
        self._unchecked_steps = _CHECKED_STEPS
        self._stop_signal = False
        self._holds_folder = False
        self._keeper = CheckpointKeeper(self.config, self.state, self._save)
        self._random: RankState | None = None
        if self.run.train_loader is not None:
            self.non_finite = NonFinitePolicy(self.config, self.run.train_loader.sampler, self.run.mesh)
            if self.run.checkpoint is not None:
                self._resume(self.run.checkpoint)
        if self.lr_scheduler is None:
            self._set_lr()
        self._call("on_init_end")

    def planned_steps(self) -> int:
        """Optimizer steps of the run by config and data."""
        if self.run.train_loader is None:
            return 0
        sampler, run = self.run.train_loader.sampler, self.config.run
        bounds = [run.max_steps, sampler.steps_of(run.epochs) if run.epochs is not None else None]
        return min(bound for bound in bounds if bound is not None)

    def train(self) -> TrainerState:
        """Runs every step, the evaluations, and the export at the end.

        Raises:
            UserError: No training data; a loss or gradient that is not finite; an export that cannot be written.
        """
        if self.run.train_loader is None:
            raise ConfigError(
                "there is no training data",
                "training needs data.train or Trainer(train_dataset=...)",
                "set data.train to json, jsonl or parquet files",
            )
        ends_together = False
        try:
            with signals.listening(), self.run.mesh.monitor.guard(), self._output_folder():
                self._train()
        except StopRequested:
            ends_together = True
            raise
        except DsTrainerError as error:
            report_error(error)  # At once: a launcher kills this rank as soon as another one has ended.
            ends_together = isinstance(error, UserError) and error.on_all_ranks
            raise
        finally:  # After the guard: a tracker that is slow to end does not keep an error from the other ranks.
            for callback in self.callbacks:
                callback.close()
            if ends_together:
                barrier_before_exit(self.run.mesh, "the end of train()")
        return self.state

    @contextmanager
    def _output_folder(self) -> Iterator[None]:
        """Holds the output folder on rank 0 and sets an earlier run's metrics aside."""
        with ExitStack() as stack:
            agree(self.run.mesh, "train()")
            with consensus(self.run.mesh, "the output folder"):
                if self.is_world_process_zero:
                    output_dir = Path(self.config.run.output_dir)
                    stack.enter_context(claimed(output_dir))
                    remove_unfinished_saves(output_dir)
                    if self.run.checkpoint is None:
                        set_aside_earlier_run(output_dir)
            self._holds_folder = True
            try:
                yield
            finally:
                self._holds_folder = False

    def _train(self) -> None:
        try:
            with consensus(self.run.mesh, "the trial save"):
                self._trial_save()
            self._call("on_train_begin")
            self._agree_on_wishes()  # A run that early stopping had ended takes no step when it is resumed.
            self._set_random_state()
            self._loop()
            self._finish()
        except StopRequested:
            self._save_and_stop()

    def _loop(self) -> None:
        """Steps, evaluations and checkpoints, up to the last step, which `_finish` deals with."""
        self._evaluate_if(self._evaluation_is_due() if self.state.global_step else self.config.evaluation.at_start)
        while not self._is_done():
            wishes = self.train_step()
            if self._is_done():
                break
            self._keeper.after_step(wishes.should_save)
            self._evaluate_if(wishes.should_evaluate or self._evaluation_is_due())
            if self._stop_signal:
                raise StopRequested

    def _is_done(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    def _finish(self) -> None:
        """What is left after the last step: no way leads back to these weights, so they are written first."""
        self._keeper.at_end()
        best = self.config.checkpoint.load_best_model_at_end
        if self.config.checkpoint.export and not best:
            self.save_model()
        self._evaluate_if(self.config.evaluation.at_end or self._evaluation_is_due())
        if self._stop_signal:
            raise StopRequested
        if self.config.checkpoint.export and best:
            self.save_model()
        self._call("on_train_end")
        self._report_idle_steps()

    def _save_and_stop(self) -> NoReturn:
        """Ends the run at a signal: one whole checkpoint, and an exit code of its own on every rank."""
        why = "; ".join(dict.fromkeys(filter(None, self.run.mesh.gather_over_world(signals.reason()))))
        self._keeper.at_stop()
        get_logger().warning(
            "stopped by %s after step %d: checkpoint.resume = auto goes on from there (exit code %d)",
            why,
            self.state.global_step,
            signals.EXIT_CODE,
        )
        signals.forget()
        self._call("on_interrupt")
        raise StopRequested

    def _report_idle_steps(self) -> None:
        for count, what in (
            (self.state.empty_steps, "had no label token"),
            (self.state.skipped_steps, "were dropped because they were not finite"),
        ):
            if count:
                get_logger().warning("warning: %d of %d steps %s", count, self.state.global_step, what)

    @guarded
    def train_step(self) -> TrainerControl:
        """One optimizer step: micro-batches, reduction, clipping, update, the next learning rate, logging.

        Returns:
            What callbacks of any rank asked for in it; a wish to stop or to log has been seen to.
        """
        loader, state = self.run.train_loader, self.state
        assert loader is not None
        self._set_random_state()
        if loader.sampler.position(state.global_step).start == 0:
            self._call("on_epoch_begin")
        began, waited = time.monotonic(), loader.input_wait_s
        self._call("on_step_begin")
        place = f"step {state.global_step + 1}"
        mine = loader.sampler.microbatches(state.global_step)
        self.run.mesh.monitor.at(place, state.global_step + 1, [i for samples in mine for i in samples])
        microbatches = loader.step(state.global_step)
        step_loss = run_step(microbatches, self.run.executor, self.run.loss, self.run.mesh, place)
        lr = self.engine.param_groups()[0]["lr"]
        skipped = self._update(step_loss)
        state.global_step += 1
        if self._unchecked_steps:
            self._unchecked_steps -= 1
            check_replicas(self.engine, self.run.mesh, place)
        state.epoch = loader.sampler.epochs_before(state.global_step)
        state.loss = step_loss.mean if step_loss.num_tokens else None
        self._set_lr()
        self.window.add(
            loss_sum=step_loss.loss_sum,
            num_tokens=step_loss.num_tokens,
            tokens=step_loss.seen_tokens,
            samples=len(loader.sampler.global_batch(state.global_step - 1)),
            step_s=time.monotonic() - began,
            input_wait_s=loader.input_wait_s - waited,
            skipped=skipped,
        )
        self._call("on_step_end")
        if loader.sampler.position(state.global_step).start == 0:
            self._call("on_epoch_end")
        wishes = self._agree_on_wishes()
        due = state.global_step % self.config.logging.every_steps == 0
        if due or wishes.should_log or self._is_done():
            self._log(lr)
        return wishes

    def _agree_on_wishes(self) -> TrainerControl:
        """What the ranks' callbacks and signals ask for, the same on every rank.

        Comm: one consensus over all ranks.
        """
        control = self.control
        asked = (control.should_training_stop, control.should_save, control.should_evaluate, control.should_log)
        self.control = TrainerControl()
        outcome = agree(self.run.mesh, f"the end of step {self.state.global_step}", *asked)
        wishes = TrainerControl(*(count > 0 for count in outcome.sums))
        self._stop_signal |= outcome.stop
        if wishes.should_training_stop and not self._is_done():
            get_logger().info("a callback ends the training after step %d", self.state.global_step)
            self.state.max_steps = self.state.global_step
        return wishes

    def _update(self, step_loss: StepLoss) -> bool:
        """Updates the weights, unless the step has no label token or is not finite; returns whether it was dropped."""
        state = self.state
        if step_loss.num_tokens == 0:
            state.empty_steps += 1
            state.grad_norm = 0.0
            warn_once(f"step {state.global_step + 1} has no label token: it updates nothing, schedule and data move on")
            return False
        self._call("on_pre_optimizer_step")
        self.non_finite.check_loss(step_loss, state.global_step)
        outcome = self.engine.optimizer_step()
        state.grad_norm = outcome.grad_norm
        state.skipped_steps += outcome.skipped
        self.non_finite.after_step(state.global_step, outcome.skipped)
        return outcome.skipped

    def _set_lr(self) -> None:
        """Sets the rate of the coming step; after the last one it stands at the schedule's end."""
        if self.lr_scheduler is not None:
            if self.state.global_step:
                self.lr_scheduler.step()
            return
        factor = lr_factor(self.config.schedule, self.state.global_step, self.state.max_steps)
        for group, base in zip(self.engine.param_groups(), self._base_lrs, strict=True):
            group["lr"] = base * factor

    def _log(self, lr: float) -> None:
        state = self.state
        metrics = self.window.take(
            step=state.global_step,
            epoch=state.epoch,
            lr=lr,
            grad_norm=state.grad_norm,
            memory_bytes=peak_memory_bytes(self.run.mesh.device),
        )
        state.log_history.append(metrics)
        self._call("on_log", metrics)

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluation.every_steps
        return every is not None and self.state.global_step % every == 0

    def _evaluate_if(self, due: bool) -> None:
        """Evaluates if it is due, there is data, and this very step has not been evaluated yet."""
        last = self.state.log_history[-1] if self.state.log_history else None
        done = isinstance(last, EvalMetrics) and last.step == self.state.global_step
        if due and not done and self.run.eval_loader is not None:
            self.evaluate()

    def _after_evaluation(self, metrics: EvalMetrics) -> None:
        wishes = self._agree_on_wishes()
        self._keeper.after_evaluation(metrics)  # After the callbacks: their states go into the checkpoint.
        if wishes.should_save:
            self._keeper.save_once()

    @guarded
    def save_checkpoint(self) -> Path:
        """Saves everything that the next step depends on, as `<output_dir>/checkpoint-<step>`. Every rank must call it.

        Raises:
            MachineError: On every rank, if one could not write; earlier checkpoints are untouched.
        """
        agree(self.run.mesh, "save_checkpoint()")
        return self._keeper.save()

    def _save(self) -> Path:
        folder = save_checkpoint(self.run, Path(self.config.run.output_dir), self.state.global_step, self.state_dict())
        self._call("on_save", folder)
        return folder

    def state_dict(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint, as JSON: progress, data position, states of loop and callbacks."""
        loader, scheduler = self.run.train_loader, self.lr_scheduler
        assert loader is not None
        # The state of an optimizer of the user's beside its parameters; the config says it for the others.
        groups = self.engine.param_groups() if self.optimizer_is_given else []
        return {
            **self.state.state_dict(),
            "planned_steps": self.planned_steps(),
            "data": {**loader.sampler.state_dict(), "probes": self.run.data_probes},
            "window": self.window.state_dict(),
            "skipped_in_a_row": self.non_finite.in_a_row,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "optimizer_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "callbacks": states_of(self.callbacks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what `state_dict` returned."""
        loader = self.run.train_loader
        assert loader is not None
        self.state.load_state_dict(state)
        loader.sampler.load_state_dict(state["data"], self.state.global_step)
        self.state.max_steps = self.planned_steps()
        if state["max_steps"] < state["planned_steps"] == self.state.max_steps:
            self.state.max_steps = state["max_steps"]  # A callback had ended the run.
        self.window.load_state_dict(state["window"])
        self.non_finite.in_a_row = state["skipped_in_a_row"]
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self.engine.param_groups(), state["optimizer_groups"], strict=False):
            group.update(saved)
        restore_states(self.callbacks, state["callbacks"])

    def _resume(self, checkpoint: VerifiedCheckpoint) -> None:
        """Goes on from a checkpoint, whose weights are in the engine already."""
        saved = checkpoint.json(STATE)
        self._random = load_checkpoint(self.run, checkpoint, saved)
        self.load_state_dict(saved)
        check_length(checkpoint, self.state)
        self._keeper.saved_step = self.state.global_step
        if self._is_done():
            text = "%s is the end of a finished run of %d steps: nothing is left to train"
            get_logger().info(text, checkpoint.folder, self.state.max_steps)
        else:
            done, total = self.state.global_step, self.state.max_steps
            get_logger().info("resumed from %s: %d of %d steps are done", checkpoint.folder, done, total)

    def _set_random_state(self) -> None:
        """Sets the random numbers of a resumed run, after all that came before its first step."""
        if self._random is not None:
            set_rng_state(self._random.tensors, self._random.rest["rng"])
            self._random = None

    def _trial_save(self) -> None:
        if self.is_world_process_zero:
            require_checkpoint_space(self.config, self.run.num_trained, self._keeper.saves_left())
            output_dir = Path(self.config.run.output_dir)
            trial_save(output_dir, self.run.model, self.run.tokenizer, self.run.export_dtype, self.state_dict())

    def close(self) -> None:
        """Releases the engine's files and hooks, and ends the data workers."""
        self.engine.close()
        for loader in (self.run.train_loader, self.run.eval_loader):
            if loader is not None:
                loader.close()

    def _call(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)
