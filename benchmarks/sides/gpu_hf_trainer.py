"""The `1b` work of `gpu.py` on transformers' Trainer: `gpu_hf_trainer.py SIZE FOLDER STARTED`, one process."""

import sys

from gpu_workload import DEVICE, DTYPE, LR, WORKS, MemoryClock, make_model, rows_of
from hf_trainer import ClockCallback
from transformers import Trainer, TrainingArguments
from workload import MAX_GRAD_NORM, WEIGHT_DECAY


def main() -> None:
    """Trains, and leaves the result."""
    size, folder, _ = sys.argv[1:]
    work = WORKS[size]["1b"]
    clock = MemoryClock(work)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=DEVICE[size] == "cpu",
        bf16=DTYPE[size] == "bf16",
        per_device_train_batch_size=work.micro,
        gradient_accumulation_steps=work.accumulation,
        max_steps=work.steps,
        optim="adamw_torch_fused",
        learning_rate=LR,
        lr_scheduler_type="cosine",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=make_model(work, size),
        args=arguments,
        train_dataset=rows_of(work),
        callbacks=[ClockCallback(clock)],
    )
    trainer.train()
    clock.write(folder, [line["loss"] for line in trainer.state.log_history if "loss" in line])


if __name__ == "__main__":
    main()
