"""Two callbacks: one keeps the best model of a run, the other, written for transformers' Trainer, ends it at a goal.

deepspeed --num_gpus 2 examples/callbacks.py --set evaluation.every_steps=5
"""

from __future__ import annotations

import math
from pathlib import Path

from transformers import TrainerCallback

from ds_trainer import Callback, Trainer, exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments
from ds_trainer.metrics import EvalMetrics


class KeepBest(Callback):
    """Writes `<output_dir>/best`. All ranks call it with the same loss, so all take part in the export."""

    def __init__(self) -> None:
        self.best = math.inf

    def on_evaluate(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """Exports, unless an earlier evaluation was better."""
        if metrics.eval_loss < self.best:
            self.best = metrics.eval_loss
            trainer.save_model(Path(trainer.config.run.output_dir) / "best")


class StopAtGoal(TrainerCallback):
    """Ends the training once the evaluation loss is low enough."""

    def __init__(self, goal: float) -> None:
        self.goal = goal

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        """Requests the end of training, which comes after this step."""
        control.should_training_stop = metrics["eval_loss"] < self.goal


def main() -> None:
    """Trains the demo's model by the demo's JSON, or by the one that the command line names."""
    args = parse_train_arguments(default_config=Path(__file__).parent / "demo" / "demo.json")
    with exit_on_user_error(args.debug):
        trainer = Trainer(config=config_from_arguments(args), callbacks=[KeepBest(), StopAtGoal(0.5)])
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
