"""The Trainer: the public calls and the training loop, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.hf import adapted
from ds_trainer.callbacks.make import built_in_callbacks
from ds_trainer.callbacks.trainer_state import TrainerControl, TrainerState
from ds_trainer.checkpoint.folder import STATE
from ds_trainer.checkpoint.rng import set_rng_state
from ds_trainer.checkpoint.save import RankState
from ds_trainer.checkpoint.verified import VerifiedCheckpoint
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.engines.replica_check import check_replicas
from ds_trainer.launch import signals
from ds_trainer.log import get_logger
from ds_trainer.metrics import EvalMetrics, WindowMean
from ds_trainer.run_folder import GENERATIONS
from ds_trainer.trainer import hf_methods
from ds_trainer.trainer.checkpoint_io import check_saving, load_best_model, load_checkpoint, save_checkpoint
from ds_trainer.trainer.checkpoint_manager import CheckpointManager
from ds_trainer.trainer.collective import collective
from ds_trainer.trainer.ending import log_idle_steps, orderly_end, stopping
from ds_trainer.trainer.eval_samples import show_samples, write_samples
from ds_trainer.trainer.generation import Decoding, Messages, generate_texts
from ds_trainer.trainer.hf_names import raise_absent, refuse_arguments, refuse_overrides
from ds_trainer.trainer.inference import evaluate, evaluate_others, predict
from ds_trainer.trainer.inputs import ConfigSource, TrainerInputs, instance_of, loaded_config
from ds_trainer.trainer.learning_rate import LearningRate
from ds_trainer.trainer.model_export import save_model
from ds_trainer.trainer.non_finite import NonFinitePolicy
from ds_trainer.trainer.output_folder import OutputFolder
from ds_trainer.trainer.progress import progress_of, restore_progress
from ds_trainer.trainer.requests import agree_on_requests
from ds_trainer.trainer.resume_checks import check_length, check_train_call, log_resumed
from ds_trainer.trainer.setup import set_up
from ds_trainer.trainer.step import StepMeter, close_window, run_passes, step_name, update_weights

if TYPE_CHECKING:
    from transformers import TrainingArguments

_CHECKED_STEPS = 3
"""First steps of a process after which replicated parameters are compared between tensor-parallel ranks."""


class Trainer:
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
        callbacks: Of this package, or `TrainerCallback` objects or classes of transformers, beside the built-in ones.
        optimizers: Your optimizer, built on the model instance that is passed, and perhaps its LR scheduler,
            whose `step()` is called once per optimizer step. With None as the scheduler the config's schedule applies.
        others: Arguments of transformers' Trainer that do not exist here, which are refused by name.

    Raises:
        UserError: Any fault of config, machine, data or model.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls, Trainer)

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
        **others: Any,
    ) -> None:
        refuse_arguments(others)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        callbacks = adapted(callbacks)
        run_config, origins = loaded_config(config, args, model, train_dataset)
        optimizer, self.lr_scheduler = optimizers
        self.optimizer_is_given = optimizer is not None
        inputs = TrainerInputs(
            model=instance_of(model),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            optimizer=optimizer,
            scheduler=self.lr_scheduler,
        )
        with signals.listening():
            self.run = set_up(run_config, origins, inputs)
        self.config, self.engine = self.run.resolved.config, self.run.engine
        grid = self.run.mesh.grid
        self.is_world_process_zero = hf_methods.RankFlag(grid.rank == 0)
        self.is_local_process_zero = hf_methods.RankFlag(grid.local_rank == 0)
        self.state = TrainerState(max_steps=self.planned_steps())
        self.callbacks: list[Callback] = [*built_in_callbacks(self.config, grid.rank == 0), *callbacks]
        self.control, self.window = TrainerControl(), WindowMean()
        self._compute_metrics = compute_metrics
        self._learning_rate = LearningRate(self.config.schedule, self.engine, self.lr_scheduler)
        self._unchecked_steps = _CHECKED_STEPS
        self._stop_signal = False
        self._output_folder = OutputFolder(self.run)
        self._checkpoints = CheckpointManager(self.config, self.state, self._save)
        self._random: RankState | None = None
        if self.run.train_loader is not None:
            self.non_finite = NonFinitePolicy(self.config, self.run.train_loader.sampler, self.run.mesh)
            if self.run.checkpoint is not None:
                self._resume(self.run.checkpoint)
        self._learning_rate.start(self.state.global_step, self.state.max_steps)
        self._call("on_init_end")

    def planned_steps(self) -> int:
        """Optimizer steps of the run by config and data."""
        return self.run.planned_steps()

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainerState:
        """Runs every step, the evaluations, and the export at the end.

        Args:
            resume_from_checkpoint: What the Trainer was set up from, if anything: `checkpoint.resume` says it.

        Raises:
            UserError: No training data; a loss or gradient that is not finite; an export that cannot be written.
        """
        self.run.training_data()
        check_train_call(self._output_folder.has_trained, self.run.checkpoint, resume_from_checkpoint)
        mesh, folder = self.run.mesh, self._output_folder
        with orderly_end(mesh, self.callbacks), signals.listening(), mesh.monitor.guard(), folder.locked():
            self._train()
        return self.state

    def _train(self) -> None:
        try:
            check_saving(self.run, self.state_dict, self._checkpoints.saves_left())
            self._call("on_train_begin")
            self._agree_on_requests()  # A run that early stopping had ended takes no step when it is resumed.
            self._set_random_state()
            self._loop()
            self._finish()
        except signals.StopRequested:
            with stopping(self.run.mesh, self.state):
                self._checkpoints.at_stop()
            self._call("on_interrupt")
            raise

    def _loop(self) -> None:
        """Steps, evaluations and checkpoints, up to the last step, which `_finish` deals with."""
        if self.state.global_step or self.config.evaluation.at_start:
            self._evaluate_if(requested=self.state.global_step == 0)
        while not self._is_done():
            requests = self.train_step()
            if self._is_done():
                break
            self._checkpoints.after_step(requests.should_save)
            self._evaluate_if(requests.should_evaluate)
            if self._stop_signal:
                raise signals.StopRequested

    def _is_done(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    def _finish(self) -> None:
        """Saves, exports and evaluates after the last step; saves first, since the weights exist nowhere else."""
        self._checkpoints.at_end(self.save_model)
        self._evaluate_if(self.config.evaluation.at_end)
        if self._stop_signal:
            raise signals.StopRequested
        self._checkpoints.export_best(partial(load_best_model, self.run, self.state), self.save_model)
        self._call("on_train_end")
        log_idle_steps(self.state)

    @collective
    def train_step(self) -> TrainerControl:
        """One optimizer step: micro-batches, reduction, clipping, update, the next learning rate, logging.

        Returns:
            What callbacks of any rank have requested in it; a request to stop or to log has been carried out.
        """
        loader, state = self.run.training_data(), self.state
        self._set_random_state()
        if loader.sampler.position(state.global_step).start == 0:
            self._call("on_epoch_begin")
        meter = StepMeter(loader)
        self._call("on_step_begin")
        step_loss = run_passes(self.run, state.global_step)
        lr = self.engine.param_groups()[0]["lr"]
        if step_loss.num_tokens:
            self._call("on_pre_optimizer_step")
        skipped = update_weights(self.engine, step_loss, state, self.non_finite)
        state.global_step += 1
        if self._unchecked_steps:
            self._unchecked_steps -= 1
            check_replicas(self.engine, self.run.mesh, step_name(state.global_step - 1))
        state.epoch = loader.sampler.epochs_before(state.global_step)
        state.loss = step_loss.mean if step_loss.num_tokens else None
        self._learning_rate.after_step(state.global_step, state.max_steps)
        meter.add_to(self.window, state.global_step - 1, step_loss, skipped)
        self._call("on_step_end")
        if loader.sampler.position(state.global_step).start == 0:
            self._call("on_epoch_end")
        requests = self._agree_on_requests()
        due = state.global_step % self.config.logging.every_steps == 0
        if due or requests.should_log or self._is_done():
            metrics = close_window(self.window, state, lr, self.run.mesh.device)
            state.log_history.append(metrics)
            self._call("on_log", metrics)
        return requests

    def _agree_on_requests(self) -> TrainerControl:
        """What callbacks and signals of any rank request, the same on every rank.

        Comm: one consensus over all ranks.
        """
        requested, self.control = self.control, TrainerControl()
        requests, stop = agree_on_requests(requested, self.run.mesh, self.state.global_step)
        self._stop_signal |= stop
        if requests.should_training_stop and not self._is_done():
            get_logger().info("a callback ends the training after step %d", self.state.global_step)
            self.state.max_steps = self.state.global_step
        return requests

    def _evaluate_if(self, requested: bool) -> None:
        """Evaluates if it is requested or due, there is data, and this very step has not been evaluated yet."""
        state, every = self.state, self.config.evaluation.every_steps
        due = requested or (every is not None and state.global_step % every == 0)
        last = state.log_history[-1] if state.log_history else None
        done = isinstance(last, EvalMetrics) and last.step == state.global_step
        if due and not done and self.run.eval_loader is not None:
            self.evaluate()

    @collective
    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Runs the evaluation data once, and continues the prompts of `evaluation.generate_samples`.

        Metrics and texts are shown; inside `train()` they are written to the output folder too.

        Args:
            eval_dataset: Other data, or a dict of them by name; neither the best model nor the history follow it.
            metric_key_prefix: Begins the names of the metrics that are returned.

        Returns:
            `eval_loss`, the token mean over the data set whatever the number of ranks, and what `compute_metrics` gave.

        Raises:
            ConfigError: There is no evaluation data.
        """
        compute, step, after = self._compute_metrics, self.state.global_step, partial(self._call, "on_prediction_step")
        if eval_dataset is not None:
            return evaluate_others(self.run, eval_dataset, metric_key_prefix, compute, after)
        metrics, generations = evaluate(self.run, step, compute, after)
        self.state.log_history.append(metrics)
        self._call("on_evaluate", metrics)
        if generations and self.is_world_process_zero:
            show_samples(generations)
            if self._output_folder.is_locked:
                write_samples(Path(self.config.run.output_dir) / GENERATIONS, generations)
        if self.run.train_loader is not None:
            requests = self._agree_on_requests()
            self._learning_rate.after_evaluation(metrics, self.config.evaluation.metric_for_best_model)
            self._checkpoints.after_evaluation(metrics)  # After the callbacks: their states go into the checkpoint.
            if requests.should_save:
                self._checkpoints.save_once()
        return metrics.named(metric_key_prefix)

    @collective
    def predict(self, test_dataset: Any) -> Any:
        """Logits of a data set, in its order. Every rank must call it.

        Args:
            test_dataset: Data set of the same kind of records as the training data.

        Returns:
            transformers' `PredictionOutput`, the same on every rank: predictions and label ids padded with -100.
        """
        output = predict(self.run, test_dataset, self._compute_metrics, partial(self._call, "on_prediction_step"))
        self._call("on_predict", output.metrics)
        return output

    @collective
    def generate(
        self,
        prompts: Sequence[str | Messages],
        *,
        max_new_tokens: int = 64,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Continues texts or conversations with the model as it is. Every rank must call it, with the same prompts.

        The training is not changed by it, and the texts are the same for any number of ranks.

        Args:
            prompts: Texts, or lists of `{"role": ..., "content": ...}`, which the assistant goes on with.
            max_new_tokens: Longest continuation.
            do_sample: Draw each token; False: take the likeliest one.
            temperature: Divides the logits that are drawn from; None, here and below: the checkpoint's own.
            top_k: Draw from so many likeliest tokens.
            top_p: Draw from the likeliest tokens that together have this probability.
            seed: Of the draws, which take nothing from the training's random numbers.

        Returns:
            The continuations, without prompts and special tokens; the same on every rank.

        Raises:
            UserError: The model is no causal language model, there is no tokenizer, or a prompt is wrong or too long.
        """
        return generate_texts(self.run, prompts, Decoding(max_new_tokens, do_sample, temperature, top_k, top_p, seed))

    @collective
    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Writes the model as a Hugging Face folder that `from_pretrained` loads. Every rank must call it.

        Args:
            output_dir: Folder; None: `<run.output_dir>/model`.
        """
        return save_model(self.run, output_dir)

    @collective
    def save_checkpoint(self) -> Path:
        """Saves everything that the next step depends on, as `<output_dir>/checkpoint-<step>`. Every rank must call it.

        Raises:
            MachineError: On every rank, if one could not write; earlier checkpoints are untouched.
        """
        agree(self.run.mesh, "save_checkpoint()")
        return self._checkpoints.save()

    def _save(self) -> Path:
        folder = save_checkpoint(self.run, Path(self.config.run.output_dir), self.state.global_step, self.state_dict())
        self._call("on_save", folder)
        return folder

    def state_dict(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint, as JSON: progress, data position, states of loop and callbacks."""
        return {**progress_of(self), **self._checkpoints.state_dict()}

    load_state_dict = restore_progress

    def _resume(self, checkpoint: VerifiedCheckpoint) -> None:
        """Goes on from a checkpoint, whose weights are in the engine already."""
        saved = checkpoint.json(STATE)
        self._random = load_checkpoint(self.run, checkpoint, saved)
        self.load_state_dict(saved)
        check_length(checkpoint, self.state)
        with consensus(self.run.mesh, "the checkpoint of the best model"):
            self._checkpoints.resumed(checkpoint.folder)
        log_resumed(checkpoint, self.state)

    def _set_random_state(self) -> None:
        """Sets the random numbers of a resumed run, after all that came before its first step."""
        if self._random is not None:
            set_rng_state(self._random.tensors, self._random.rest["rng"])
            self._random = None

    model = property(hf_methods.model)
    optimizer = property(hf_methods.optimizer)
    processing_class = property(hf_methods.processing_class)
    add_callback = hf_methods.add_callback
    pop_callback = hf_methods.pop_callback
    remove_callback = hf_methods.remove_callback
    log_metrics = hf_methods.log_metrics
    save_metrics = hf_methods.save_metrics
    save_state = hf_methods.save_state

    if not TYPE_CHECKING:  # A type checker shall go on to find names that do not exist.
        __getattr__ = raise_absent

    def close(self) -> None:
        """Releases the engine's files and hooks, and ends the data workers."""
        self.run.close()

    def _call(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)
