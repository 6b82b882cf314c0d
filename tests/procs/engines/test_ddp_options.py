"""Keys of DistributedDataParallel reach it, and the numbers stay those of one process."""

import pytest
import torch
from torch import nn

from ds_trainer.errors import ConfigError
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama

STEPS, LR = 3, 0.1


@pytest.fixture(scope="module")
def expected():
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        oracle(model, D8)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


OPTIONS = {
    "buckets": ({"bucket_cap_mb": 1}, {"bucket_bytes_cap": 2**20}),
    "no view": ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": False}),
    "static graph": ({"static_graph": True}, {"static_graph": True}),
    "unused": ({"find_unused_parameters": True}, {"find_unused_parameters": True}),
}
"""Section, and what `DistributedDataParallel` then holds."""


@pytest.mark.parametrize("option", OPTIONS)
def test_the_numbers_do_not_depend_on_how_gradients_travel(world, tmp_path, expected, option):
    section, attributes = OPTIONS[option]
    for final, held in world(train_with, 2, tmp_path, section, list(attributes)):
        assert held == attributes
        assert largest_difference(final, expected) <= 1e-6


def train_with(out, ddp, attributes=()):
    trainer = make_trainer(
        "ddp",
        out,
        batch={"global_size": 8, "micro_size": 1},  # Accumulation 4.
        ddp=ddp,
        optimizer={"lr": LR},
        run={"max_steps": STEPS},
    )
    trainer.train()
    return weights(trainer), {name: getattr(trainer.engine.module, name) for name in attributes}


def test_fp16_compression_rounds_the_gradients_on_the_wire(world, tmp_path, expected):
    for final, _ in world(train_with, 2, tmp_path, {"comm_hook": "fp16"}):
        assert 1e-6 < largest_difference(final, expected) < 1e-3


def test_power_sgd_leaves_matrices_of_the_rank_that_was_asked_for(world, tmp_path):
    for ranks in world(train_with_power_sgd, 2, tmp_path):
        assert ranks == [2, 2]


def train_with_power_sgd(out):
    trainer = make_trainer("ddp", out, ddp={"comm_hook": "powersgd", "powersgd_rank": 2}, run={"max_steps": 4})
    name = "model.layers.0.mlp.up_proj.weight"
    ranks = []
    for step in range(4):
        before = weights(trainer)[name]
        trainer.train_step()
        if step >= 2:  # torch cannot compress before its third reduction.
            update = weights(trainer)[name] - before
            ranks.append(int(torch.linalg.matrix_rank(update, rtol=1e-3)))
    return ranks


def test_bf16_compression_is_refused_where_torch_lacks_it(world, tmp_path):
    world(refuse_bf16, 1, tmp_path)


def refuse_bf16(out):
    with pytest.raises(ConfigError, match="ddp.comm_hook is .bf16.* on cpu"):
        make_trainer("ddp", out, ddp={"comm_hook": "bf16"})


class WithUnused(nn.Module):
    """A model with a branch that no sample takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return {"logits": self.used(x)}


def test_an_unused_parameter_trains_nothing_and_stops_nothing(world, tmp_path):
    initial = {name: p.detach() for name, p in WithUnused().named_parameters()}
    for final in world(train_unused, 2, tmp_path):
        assert torch.equal(final["unused.weight"], initial["unused.weight"])
        assert not torch.equal(final["used.weight"], initial["used.weight"])


def train_unused(out):
    trainer = make_trainer(
        "ddp",
        out,
        model=WithUnused(),
        rows=[[1.0, 2.0, 3.0, float(i)] for i in range(8)],
        given={
            "data_collator": lambda rows: {"x": torch.tensor(rows), "labels": torch.zeros(len(rows), dtype=torch.long)},
            "compute_loss_func": lambda outputs, labels, num_items_in_batch: (
                outputs["logits"].sum() / num_items_in_batch
            ),
        },
        ddp={"find_unused_parameters": True},
        run={"max_steps": 2},
    )
    trainer.train()
    return weights(trainer)
