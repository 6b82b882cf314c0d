"""Trains by `TrainingArguments`, which form the process group themselves, before ds_trainer."""

import sys

from transformers import TrainingArguments

from ds_trainer import Trainer
from tests.helpers.runs import D8, collate
from tests.helpers.tiny import tiny_llama

args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, max_steps=2, logging_steps=1, neftune_noise_alpha=5.0)
trainer = Trainer(model=tiny_llama(), args=args, train_dataset=D8, data_collator=collate)
trainer.train()
trainer.close()
