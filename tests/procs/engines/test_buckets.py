"""Bucket sizes decide how gradients travel, never what arrives."""

import pytest
import torch

from tests.helpers.runs import make_trainer, weights
from tests.helpers.tiers import tiers

SIZES = (64, 1000, 1_000_000)


@pytest.mark.case("G7")
@pytest.mark.parametrize("stage", tiers([1, 2, 3], quick=[3]))
def test_the_weights_do_not_depend_on_the_reduction_bucket(world, tmp_path, stage):
    for by_size in world(train_with_each_size, 2, tmp_path, stage):
        first, *others = by_size
        for other in others:
            assert all(torch.equal(other[name], first[name]) for name in first)


def train_with_each_size(out, stage):
    finals = []
    for size in SIZES:
        trainer = make_trainer(
            f"zero{stage}",
            out,
            zero={"reduce_bucket_size": size},
            optimizer={"name": "adamw", "lr": 1e-2, "max_grad_norm": 0.5},
            run={"max_steps": 3},
        )
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.run.model.parameters())
        assert trainer.engine.module.optimizer.reduce_bucket_size == min(size, numel)
        trainer.train()
        finals.append(weights(trainer))
        trainer.close()
    return finals
