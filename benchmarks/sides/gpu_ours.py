"""One of `gpu.py`'s runs on this package's Trainer: `gpu_ours.py RUN SIZE FOLDER STARTED`, one process."""

import sys

from gpu_workload import RUNS, WORKS, MemoryClock, make_model, rows_of, run_config
from ours import ClockCallback

from ds_trainer import Trainer


def main() -> None:
    """Trains, and leaves the result."""
    from transformers import default_data_collator

    name, size, folder, _ = sys.argv[1:]
    run = RUNS[name]
    work = WORKS[size][run.work]
    clock = MemoryClock(work)
    trainer = Trainer(
        model=make_model(work, size),
        config=run_config(run, size, folder),
        train_dataset=rows_of(work),
        data_collator=default_data_collator,
        callbacks=[ClockCallback(clock)],
    )
    state = trainer.train()
    scale = {"loss_scale": trainer.engine.scalar_state()["loss_scaler"]["cur_scale"]} if name == "fp16" else {}
    clock.write(folder, [line.loss for line in state.log_history], **scale)
    trainer.close()


if __name__ == "__main__":
    main()
