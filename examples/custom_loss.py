"""Train with a user-defined loss: cross entropy plus PaLM's z-loss, which keeps the logits from drifting.

deepspeed --num_gpus 2 examples/custom_loss.py
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ds_trainer import Trainer, exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments

Z_WEIGHT = 1e-4


def loss_with_z(outputs: Any, labels: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
    """Cross entropy plus 1e-4 times the squared logarithm of the softmax's denominator.

    A sum over this micro-batch's label tokens divided by those of the full step, so that it is the same mean on any
    number of ranks and micro-batches.

    Source: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5.
    """
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    learned = targets != -100
    log_z = logits[learned].logsumexp(dim=-1)
    cross_entropy = F.cross_entropy(logits[learned], targets[learned], reduction="sum")
    return (cross_entropy + Z_WEIGHT * log_z.square().sum()) / num_items_in_batch


def main() -> None:
    """Trains the demo's model by the demo's JSON, or by the one that the command line names."""
    args = parse_train_arguments(default_config=Path(__file__).parent / "demo" / "demo.json")
    with exit_on_user_error(args.debug):
        trainer = Trainer(config=config_from_arguments(args), compute_loss_func=loss_with_z)
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
