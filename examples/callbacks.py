"""Keep the best model of a run: a callback that exports whenever the evaluation loss is the lowest so far.

deepspeed --num_gpus 2 examples/callbacks.py --set evaluation.every_steps=5
"""

from __future__ import annotations

import math
from pathlib import Path

from ds_trainer import Callback, Trainer, exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments
from ds_trainer.metrics import EvalMetrics


class KeepBest(Callback):
    """Writes `<output_dir>/best`. All ranks call it with the same loss, so all take part in the export together."""

    def __init__(self) -> None:
        self.best = math.inf

    def on_evaluate(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """Exports, unless an earlier evaluation was better."""
        if metrics.eval_loss < self.best:
            self.best = metrics.eval_loss
            trainer.save_model(Path(trainer.config.run.output_dir) / "best")


def main() -> None:
    """Trains the demo's model by the demo's JSON, or by the one that the command line names."""
    args = parse_train_arguments(default_config=Path(__file__).parent / "demo" / "demo.json")
    with exit_on_user_error(args.debug):
        trainer = Trainer(config=config_from_arguments(args), callbacks=[KeepBest()])
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
