"""This package's Trainer: `ours.py ENGINE FOLDER STARTED`, one process per rank."""

import sys

from workload import Clock, make_model, make_rows, run_config

from ds_trainer import Callback, Trainer


class ClockCallback(Callback):
    """Calls a clock at the end of every step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, trainer: Trainer) -> None:
        """Notes the time."""
        self._clock.step_ended()


def main() -> None:
    """Trains, and leaves rank 0's result."""
    from transformers import default_data_collator

    engine, folder, _ = sys.argv[1:]
    clock = Clock()
    trainer = Trainer(
        model=make_model(),
        config=run_config(engine, folder),
        train_dataset=make_rows(),
        data_collator=default_data_collator,
        callbacks=[ClockCallback(clock)],
    )
    state = trainer.train()
    if trainer.is_world_process_zero:
        native = {"native": trainer.engine.native} if engine == "deepspeed" else {}
        clock.write(folder, [line.loss for line in state.log_history], **native)
    trainer.close()


if __name__ == "__main__":
    main()
