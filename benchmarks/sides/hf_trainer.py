"""transformers' Trainer under DDP: `hf_trainer.py FOLDER STARTED`, one process per rank."""

import sys
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments
from workload import ACCUMULATION, LR, MAX_GRAD_NORM, MICRO, STEPS, WEIGHT_DECAY, Clock, make_model, make_rows


class ClockCallback(TrainerCallback):
    """Calls a clock at the end of every step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Notes the time."""
        self._clock.step_ended()


def main() -> None:
    """Trains, and leaves rank 0's result."""
    folder, _ = sys.argv[1:]
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="cosine",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=make_rows(), callbacks=[ClockCallback(clock)])
    trainer.train()
    if trainer.is_world_process_zero():
        clock.write(folder, [line["loss"] for line in trainer.state.log_history if "loss" in line])
    dist.destroy_process_group()  # Without it a process may crash as it ends.


if __name__ == "__main__":
    main()
