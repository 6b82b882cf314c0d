"""The Trainer: wires the parts of a run together and holds the loop. What differs between engines is not here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.assembly import Ingredients, assemble
from ds_trainer.callbacks import Callback, MetricsCallback, PlotCallback, ProgressCallback
from ds_trainer.checkpoint.export import export_model
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import total_steps
from ds_trainer.config.schema import RunConfig
from ds_trainer.data.loader import BatchLoader
from ds_trainer.errors import ConfigError
from ds_trainer.evaluation import EvaluationResult, prediction_metrics, run_evaluation
from ds_trainer.executors.accumulate import StepLoss, run_accumulate
from ds_trainer.log import get_logger, warn_once
from ds_trainer.mesh.agree import agreed
from ds_trainer.mesh.memory import peak_memory_bytes
from ds_trainer.metrics import EvalMetrics, WindowMean
from ds_trainer.non_finite import NonFinitePolicy
from ds_trainer.optim import lr_factor
from ds_trainer.output import METRICS, MODEL, claimed, set_aside_earlier_run
from ds_trainer.state import TrainerState

ConfigSource = str | Path | dict | RunConfig | tuple[RunConfig, dict[str, str]]


class Trainer:
    """Trains a Hugging Face model by one config. Arguments are named as those of transformers' `Trainer`.

    Args:
        model: Folder or hub id of a checkpoint (then it replaces `model.path`), or a model instance.
        config: The run's JSON: a path, a dict, a `RunConfig`, or what `load_config` returned.
        train_dataset: Data set object, instead of `data.train`.
        eval_dataset: Data set object, instead of `data.eval`.
        processing_class: Tokenizer, instead of the checkpoint's.
        data_collator: Makes a batch of a list of samples; the data sets are then used as they are.
        compute_loss_func: `f(outputs, labels, num_items_in_batch=n)`: a sum of token losses divided by n, the label
            tokens of the whole step over all ranks.
        compute_metrics: `f(EvalPrediction) -> dict`, called on the predictions of a whole evaluation.
        callbacks: Callbacks, beside the built-in ones.
        optimizers: Optimizer of your own, built on the model instance that is passed, and perhaps its LR scheduler,
            whose `step()` is called once per optimizer step. With None as the scheduler the config's schedule applies.

    Raises:
        UserError: Any fault of config, machine, data or model.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | None = None,
        config: ConfigSource | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: Sequence[Callback] = (),
        optimizers: tuple[torch.optim.Optimizer | None, Any | None] = (None, None),
    ) -> None:
        _check_callbacks(callbacks)
        run_config, origins = _loaded(config, model)
        optimizer, self._lr_scheduler = optimizers
        given = Ingredients(
            model=model if isinstance(model, nn.Module) else None,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            optimizer=optimizer,
            scheduler=self._lr_scheduler,
        )
        self.run = assemble(run_config, origins, given)
        self.config = self.run.resolved.config
        self.engine = self.run.engine
        self.is_world_process_zero = self.run.mesh.grid.rank == 0
        self.state = TrainerState(max_steps=self._total_steps())
        self.callbacks = [*self._built_in_callbacks(), *callbacks]
        self._compute_metrics = compute_metrics
        self._base_lrs = [group["lr"] for group in self.engine.param_groups()]
        self._window = WindowMean()
        if self.run.train_loader is not None:
            self._non_finite = NonFinitePolicy(self.config, self.run.train_loader.sampler, self.run.mesh)
        self._set_lr()

    def _total_steps(self) -> int:
        if self.run.train_loader is None:
            return 0
        samples = self.run.train_loader.sampler.num_samples
        config = self.config
        assert config.batch.global_size is not None
        return total_steps(samples, config.batch.global_size, config.run.epochs, config.run.max_steps)

    def _built_in_callbacks(self) -> list[Callback]:
        if not self.is_world_process_zero:
            return []
        folder = Path(self.config.run.output_dir)
        metrics = folder / METRICS
        built_in: list[Callback] = [ProgressCallback(self.config.logging.progress_bar), MetricsCallback(metrics)]
        return [*built_in, PlotCallback(metrics, folder)] if self.config.logging.plots else built_in

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
        with self._output_folder():
            self._train()
        return self.state

    @contextmanager
    def _output_folder(self) -> Iterator[None]:
        """Holds the output folder on rank 0 and sets an earlier run's metrics aside."""
        with ExitStack() as stack:
            with agreed(self.run.mesh):
                if self.is_world_process_zero:
                    stack.enter_context(claimed(Path(self.config.run.output_dir)))
                    set_aside_earlier_run(Path(self.config.run.output_dir))
            yield

    def _train(self) -> None:
        try:
            self._call("on_train_begin")
            self._evaluate_if(self.config.evaluation.at_start)
            while self.state.global_step < self.state.max_steps:
                self.train_step()
                if self.state.global_step < self.state.max_steps:
                    self._evaluate_if(self._evaluation_is_due())
            if self.config.checkpoint.export:
                self.save_model()  # Before anything else that could fail: there is no way back to these weights.
            self._evaluate_if(self.config.evaluation.at_end or self._evaluation_is_due())
            self._call("on_train_end")
            self._report_idle_steps()
        finally:
            for callback in self.callbacks:
                callback.close()

    def _report_idle_steps(self) -> None:
        for count, what in (
            (self.state.empty_steps, "had no label token"),
            (self.state.skipped_steps, "were dropped because they were not finite"),
        ):
            if count:
                get_logger().warning("warning: %d of %d steps %s", count, self.state.global_step, what)

    def train_step(self) -> StepLoss:
        """One optimizer step: micro-batches, reduction, clipping, update, the next learning rate, logging."""
        loader, state = self.run.train_loader, self.state
        assert loader is not None
        began, waited = time.monotonic(), loader.input_wait_s
        self._call("on_step_begin")
        step_loss = run_accumulate(loader.step(state.global_step), self.engine, self.run.loss, self.run.mesh)
        lr = self.engine.param_groups()[0]["lr"]
        skipped = self._update(step_loss)
        state.global_step += 1
        state.epoch = state.global_step / loader.sampler.steps_per_epoch
        state.loss = step_loss.mean if step_loss.num_tokens else None
        self._set_lr()
        self._window.add(
            loss_sum=step_loss.loss_sum,
            num_tokens=step_loss.num_tokens,
            tokens=step_loss.seen_tokens,
            samples=len(loader.sampler.global_batch(state.global_step - 1)),
            step_s=time.monotonic() - began,
            input_wait_s=loader.input_wait_s - waited,
            skipped=skipped,
        )
        self._call("on_step_end")
        if state.global_step % self.config.logging.every_steps == 0 or state.global_step == state.max_steps:
            self._log(lr)
        return step_loss

    def _update(self, step_loss: StepLoss) -> bool:
        """Updates the weights, unless the step has no label token or is not finite; returns whether it was dropped."""
        state = self.state
        if step_loss.num_tokens == 0:
            state.empty_steps += 1
            state.grad_norm = 0.0
            warn_once(f"step {state.global_step + 1} has no label token: it updates nothing, schedule and data move on")
            return False
        self._call("on_pre_optimizer_step")
        self._non_finite.check_loss(step_loss, state.global_step)
        outcome = self.engine.finish()
        state.grad_norm = outcome.grad_norm
        state.skipped_steps += outcome.skipped
        self._non_finite.after_step(state.global_step, outcome.skipped)
        return outcome.skipped

    def _set_lr(self) -> None:
        """Sets the rate of the coming step; after the last one it stands at the schedule's end."""
        if self._lr_scheduler is not None:
            if self.state.global_step:
                self._lr_scheduler.step()
            return
        factor = lr_factor(self.config.schedule, self.state.global_step, self.state.max_steps)
        for group, base in zip(self.engine.param_groups(), self._base_lrs, strict=True):
            group["lr"] = base * factor

    def _log(self, lr: float) -> None:
        state = self.state
        metrics = self._window.take(
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

    def evaluate(self) -> dict[str, float]:
        """Runs the evaluation data once.

        Returns:
            `eval_loss`, the token mean over the data set whatever the number of ranks, and what `compute_metrics` gave.
        """
        if self.run.eval_loader is None:
            raise ConfigError(
                "there is no evaluation data",
                "evaluation needs data.eval or Trainer(eval_dataset=...)",
                "set data.eval to json, jsonl or parquet files",
            )
        result = self._evaluate_on(self.run.eval_loader, collect=self._compute_metrics is not None)
        extra = {f"eval_{k}": float(v) for k, v in prediction_metrics(result, self._compute_metrics).items()}
        metrics = EvalMetrics(self.state.global_step, result.loss, result.num_tokens, result.seconds, extra)
        self.state.log_history.append(metrics)
        self._call("on_evaluate", metrics)
        return {"eval_loss": result.loss, **extra}

    def predict(self, test_dataset: Any) -> Any:
        """Logits of a data set, in its order.

        Args:
            test_dataset: Data set of the same kind of records as the training data.

        Returns:
            transformers' `PredictionOutput`, the same on every rank: predictions and label ids padded with -100.
        """
        from transformers.trainer_utils import PredictionOutput

        loader = self.run.splits.test(test_dataset)
        result = self._evaluate_on(loader, collect=True)
        assert result.predictions is not None
        metrics = {f"test_{k}": float(v) for k, v in prediction_metrics(result, self._compute_metrics).items()}
        return PredictionOutput(result.predictions, result.label_ids, {"test_loss": result.loss, **metrics})

    def _evaluate_on(self, loader: BatchLoader, collect: bool) -> EvaluationResult:
        return run_evaluation(loader, self.engine, self.run.loss, self.run.mesh, collect)

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Writes the model as a Hugging Face folder that `from_pretrained` loads. Every rank must call it.

        Args:
            output_dir: Folder; None: `<run.output_dir>/model`.
        """
        folder = Path(output_dir or Path(self.config.run.output_dir) / MODEL)
        with agreed(self.run.mesh):
            export_model(
                self.engine.full_parameters(),
                self.run.model,
                self.run.tokenizer,
                str(folder),
                dtype=self.run.export_dtype,
                max_shard_size=self.config.checkpoint.max_shard_size,
                is_writer=self.is_world_process_zero,
            )
        get_logger().info("model: %s", folder)
        return folder

    def close(self) -> None:
        """Releases the engine's files and hooks."""
        self.engine.close()

    def _call(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)


def _loaded(config: ConfigSource | None, model: Any) -> tuple[RunConfig, dict[str, str]]:
    """The config and where its keys come from; a checkpoint handed as `model` replaces `model.path`."""
    run_config, origins = config if isinstance(config, tuple) else load_config({} if config is None else config)
    if isinstance(model, str | Path):
        said = f" (instead of {run_config.model.path})" if run_config.model.path else ""
        section = run_config.model.model_copy(update={"path": str(model)})
        run_config = run_config.model_copy(update={"model": section})
        origins = origins | {"model.path": f"Trainer(model=...){said}"}
    return run_config, origins


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    strangers = [type(callback).__name__ for callback in callbacks if not isinstance(callback, Callback)]
    if strangers:
        raise ConfigError(
            f"callbacks holds {', '.join(strangers)}",
            "a callback is a ds_trainer.Callback: what transformers' callbacks are given does not exist here",
            "subclass ds_trainer.Callback; its methods have the same names and get the trainer",
        )
