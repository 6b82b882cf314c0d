"""Keys of DistributedDataParallel reach it, and the numbers stay those of one process."""

import pytest
import torch
from torch import nn

from ds_trainer.errors import ConfigError
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama


@pytest.fixture(scope="module")
def expected():
    model = tiny_llama()
    oracle(model, D8)
    return {name: p.detach() - p.grad for name, p in model.named_parameters()}


OPTIONS = {
    "buckets": {"bucket_cap_mb": 1},
    "no view": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_numbers_do_not_depend_on_how_gradients_travel(world, tmp_path, expected, option):
    for final in world(train_with, 2, tmp_path, OPTIONS[option]):
        assert largest_difference(final, expected) <= 1e-6


def train_with(out, ddp):
    trainer = make_trainer("ddp", out, ddp=ddp)
    for key, value in ddp.items():
        got = getattr(trainer.engine.module, {"bucket_cap_mb": "bucket_bytes_cap"}.get(key, key))
        assert got == (value * 2**20 if key == "bucket_cap_mb" else value)
    trainer.train()
    return weights(trainer)


def test_fp16_compression_rounds_the_gradients_on_the_wire(world, tmp_path, expected):
    for final in world(train_with_hook, 2, tmp_path, "fp16"):
        error = largest_difference(final, expected)
        assert 1e-6 < error < 1e-2


def train_with_hook(out, hook):
    trainer = make_trainer("ddp", out, ddp={"comm_hook": hook})
    trainer.train()
    return weights(trainer)


def test_power_sgd_compresses_matrices_from_its_start_on(world, tmp_path):
    """A matrix's gradient then has the rank that was asked for."""
    for ranks in world(train_with_power_sgd, 2, tmp_path):
        assert ranks == [2, 2]


def train_with_power_sgd(out):
    model = tiny_llama()
    trainer = make_trainer(
        "ddp", out, model=model, ddp={"comm_hook": "powersgd", "powersgd_rank": 2}, run={"max_steps": 6}
    )
    name = "model.layers.0.mlp.up_proj.weight"
    ranks = []
    for step in range(6):
        before = weights(trainer)[name]
        trainer.train_step()
        if step >= 4:  # torch compresses nothing before its iteration `start_powerSGD_iter`.
            update = weights(trainer)[name] - before
            ranks.append(int(torch.linalg.matrix_rank(update, rtol=1e-3)))
    return ranks


@pytest.mark.parametrize("hook", ["bf16"])
def test_bf16_compression_is_refused_where_torch_lacks_it(world, tmp_path, hook):
    world(refuse_hook, 1, tmp_path, hook)


def refuse_hook(out, hook):
    with pytest.raises(ConfigError, match="ddp.comm_hook is .bf16.* on cpu"):
        make_trainer("ddp", out, ddp={"comm_hook": hook})


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
