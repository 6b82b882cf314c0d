"""What a user asks of the model beside its training: an evaluation, predictions, texts, the export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint.export import export_model
from ds_trainer.checkpoint.verified import open_checkpoint
from ds_trainer.config.schema import RunConfig
from ds_trainer.data.consistency import check_same_dataset
from ds_trainer.data.loader import BatchLoader
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.engines.base import Engine
from ds_trainer.errors import ConfigError
from ds_trainer.log import get_logger
from ds_trainer.metrics import EvalMetrics
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.run_folder import GENERATIONS, MODEL
from ds_trainer.trainer.checkpoint_io import best_parameters
from ds_trainer.trainer.eval_samples import continued, keep, show
from ds_trainer.trainer.evaluation import EvaluationResult, prediction_metrics, run_evaluation
from ds_trainer.trainer.generation import Decoding, Messages, generate_texts
from ds_trainer.trainer.run import Run

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="ModelCalls")


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """One of the trainer's calls that all ranks make: an exception that leaves it on one of them ends all."""

    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.run.mesh.monitor.guard():
            return method(self, *args, **kwargs)

    return call


class ModelCalls:
    """The part of `Trainer` that does not train. Every rank must make each of these calls."""

    run: Run
    config: RunConfig
    engine: Engine
    state: TrainerState
    is_world_process_zero: bool
    _compute_metrics: Callable | None
    _holds_folder: bool

    def _call(self, event: str, *args: Any) -> None:
        """Calls every callback."""
        raise NotImplementedError

    def _after_evaluation(self, metrics: EvalMetrics) -> None:
        """What the training makes of an evaluation."""
        raise NotImplementedError

    @guarded
    def evaluate(self) -> dict[str, float]:
        """Runs the evaluation data once, and continues the prompts of `evaluation.generate_samples`.

        What it finds is shown; inside `train()` it is written to the output folder too.

        Returns:
            `eval_loss`, the token mean over the data set whatever the number of ranks, and what `compute_metrics` gave.
        """
        if self.run.eval_loader is None:
            raise ConfigError(
                "there is no evaluation data",
                "evaluation needs data.eval or Trainer(eval_dataset=...)",
                "set data.eval to json, jsonl or parquet files",
            )
        agree(self.run.mesh, "evaluate()")
        result = self._evaluate_on(self.run.eval_loader, collect=self._compute_metrics is not None)
        # Before the evaluation counts as done: one that a stop cuts short is made anew when the run goes on.
        generations = continued(self.run, self.state.global_step)
        extra = {f"eval_{k}": float(v) for k, v in prediction_metrics(result, self._compute_metrics).items()}
        metrics = EvalMetrics(self.state.global_step, result.loss, result.num_tokens, result.seconds, extra)
        self.state.log_history.append(metrics)
        self._call("on_evaluate", metrics)
        if generations and self.is_world_process_zero:
            show(generations)
            if self._holds_folder:
                keep(Path(self.config.run.output_dir) / GENERATIONS, generations)
        if self.run.train_loader is not None:
            self._after_evaluation(metrics)
        return {"eval_loss": result.loss, **extra}

    @guarded
    def predict(self, test_dataset: Any) -> Any:
        """Logits of a data set, in its order.

        Args:
            test_dataset: Data set of the same kind of records as the training data.

        Returns:
            transformers' `PredictionOutput`, the same on every rank: predictions and label ids padded with -100.
        """
        from transformers.trainer_utils import PredictionOutput

        agree(self.run.mesh, "predict()")
        loader = self.run.loaders.test(test_dataset)
        check_same_dataset(loader, self.run.mesh, "test")
        result = self._evaluate_on(loader, collect=True)
        assert result.predictions is not None
        metrics = {f"test_{k}": float(v) for k, v in prediction_metrics(result, self._compute_metrics).items()}
        metrics = {"test_loss": result.loss, **metrics}
        self._call("on_predict", metrics)
        return PredictionOutput(result.predictions, result.label_ids, metrics)

    @guarded
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

    @guarded
    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Writes the model as a Hugging Face folder that `from_pretrained` loads. Every rank must call it.

        Args:
            output_dir: Folder; None: `<run.output_dir>/model`.
        """
        folder = Path(output_dir or Path(self.config.run.output_dir) / MODEL)
        agree(self.run.mesh, "save_model()")
        with consensus(self.run.mesh, "the export"):
            export_model(
                self._parameters_to_export(),
                self.run.model,
                self.run.tokenizer,
                str(folder),
                dtype=self.run.export_dtype,
                max_shard_size=self.config.checkpoint.max_shard_size,
                is_writer=self.is_world_process_zero,
                buffers=self._buffers_to_export(),
            )
        get_logger().info("model: %s", folder)
        return folder

    def _evaluate_on(self, loader: BatchLoader, collect: bool) -> EvaluationResult:
        run = self.run
        # Running statistics are of each rank's own samples. The first rank's are evaluated, and are what is exported.
        run.mesh.broadcast_over_dp(buffer for _, buffer in persistent_buffers(run.model))
        return run_evaluation(
            loader, run.engine, run.executor, run.loss, run.mesh, collect, lambda: self._call("on_prediction_step")
        )

    def _parameters_to_export(self) -> Iterator[tuple[str, torch.Tensor]]:
        best = self.state.best_model_checkpoint
        if best is None or not self.config.checkpoint.load_best_model_at_end:
            return self.engine.full_parameters()
        get_logger().info("the export is the best model, of step %d", self.state.best_global_step)
        return best_parameters(self.engine, open_checkpoint(Path(best), self.run.mesh).shards())

    def _buffers_to_export(self) -> dict[str, torch.Tensor]:
        """Those of every stage of the pipeline. Comm: one gather of them over it; none without one."""
        mine = dict(persistent_buffers(self.run.model))
        if self.run.mesh.grid.pp_size == 1:
            return mine
        everyones = self.run.mesh.gather_over_pp({name: buffer.cpu() for name, buffer in mine.items()})
        return {name: buffer for stage in everyones for name, buffer in stage.items()}
