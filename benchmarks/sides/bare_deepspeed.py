"""A loop of one's own around `deepspeed.initialize`: `bare_deepspeed.py FOLDER STARTED`, one process per rank.

It does what the step needs and no more: ours besides checks, agrees among the ranks, and logs every step.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset
from transformers import default_data_collator
from workload import ACCUMULATION, MICRO, RANKS, STEPS, Clock, make_model, make_rows, run_config

from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.machine import probe_machine_pure
from ds_trainer.config.resolve import resolve
from ds_trainer.host.deepspeed_ops import disable_shm_comm
from ds_trainer.optim import lr_factor, make_optimizer


def main() -> None:
    """Trains, and leaves rank 0's result."""
    folder, _ = sys.argv[1:]
    disable_shm_comm()  # DeepSpeed would compile it first; ours does without it too.
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = make_model()
    sizes = [parameter.numel() for parameter in model.parameters()]
    machine = probe_machine_pure(RANKS, "cpu")
    resolved = resolve(*load_config(run_config("deepspeed", folder)), machine, None, sum(sizes), max(sizes))
    native, schedule = to_deepspeed(resolved), resolved.config.schedule
    named = list(model.named_parameters())
    optimizer = make_optimizer(named, {name: p.shape for name, p in named}, resolved, None)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(schedule, step, STEPS))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=native)
    engine.train()

    rows, rank, clock, losses = make_rows(), dist.get_rank(), Clock(), []
    mine = [i for i in range(len(rows)) if i // MICRO % RANKS == rank]
    batches = iter(DataLoader(Subset(rows, mine), batch_size=MICRO, collate_fn=default_data_collator))
    for _ in range(STEPS):
        step = [next(batches) for _ in range(ACCUMULATION)]
        num_tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        dist.all_reduce(num_tokens)
        loss_sum = torch.zeros(())
        for batch in step:
            labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
            logits = engine(**batch).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
            engine.backward(loss * RANKS, scale_wrt_gas=False)
            engine.step()
            loss_sum += loss.detach()
        losses.append(loss_sum)
        clock.step_ended()
    means = torch.stack(losses)
    dist.all_reduce(means)
    if rank == 0:
        clock.write(folder, means.tolist(), native=native)
    engine.destroy()


if __name__ == "__main__":
    main()
