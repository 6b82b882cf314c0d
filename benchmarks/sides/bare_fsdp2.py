"""A loop of one's own around `fully_shard`: `bare_fsdp2.py FOLDER STARTED`, one process per rank.

It does what the step needs and no more: ours besides checks, agrees among the ranks, and logs every step.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset
from transformers import default_data_collator
from workload import ACCUMULATION, MICRO, RANKS, STEPS, Clock, make_model, make_rows, run_config

from ds_trainer.config.io import load_config
from ds_trainer.config.machine import probe_machine_pure
from ds_trainer.config.resolve import resolve
from ds_trainer.interop.torch.snippet import fsdp2_snippet
from ds_trainer.optim import lr_factor


def main() -> None:
    """Trains, and leaves rank 0's result."""
    folder, _ = sys.argv[1:]
    dist.init_process_group("gloo")
    resolved = resolve(*load_config(run_config("fsdp2", folder)), probe_machine_pure(RANKS, "cpu"))
    config, snippet = resolved.config, {}
    exec(fsdp2_snippet(resolved), snippet)  # The same groups with the same arguments as ours.
    model = snippet["wrap"](make_model())
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(config.schedule, step, STEPS))

    rows, rank, clock, losses = make_rows(), dist.get_rank(), Clock(), []
    mine = [i for i in range(len(rows)) if i // MICRO % dist.get_world_size() == rank]
    batches = iter(DataLoader(Subset(rows, mine), batch_size=MICRO, collate_fn=default_data_collator))
    for _ in range(STEPS):
        step = [next(batches) for _ in range(ACCUMULATION)]
        num_tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        dist.all_reduce(num_tokens)
        loss_sum = torch.zeros(())
        for index, batch in enumerate(step):
            model.set_requires_gradient_sync(index == ACCUMULATION - 1)
            labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = model(**batch).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
            loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
        clock.step_ended()
    means = torch.stack(losses)
    dist.all_reduce(means)
    if rank == 0:
        clock.write(folder, means.tolist())
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads abort a process that ends while they still free tensors.


if __name__ == "__main__":
    main()
