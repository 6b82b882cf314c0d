"""Every optimizer of the config against plain torch, and what engines refuse."""

import pytest
import torch
from lion_pytorch import Lion

from ds_trainer.config.io import load_config
from ds_trainer.errors import ConfigError
from tests.helpers.runs import D8, ENGINES, largest_difference, make_trainer, run_config, weights
from tests.helpers.tiny import oracle, tiny_llama

STEPS = 3
DECAY = 0.1
SECTIONS = {
    "adamw": {"lr": 1e-2, "eps": 1e-4, "betas": [0.8, 0.9]},
    "adam": {"lr": 1e-2, "eps": 1e-4, "betas": [0.8, 0.9]},
    "sgd": {"lr": 0.5, "momentum": 0.9},
    "lion": {"lr": 1e-3, "betas": [0.8, 0.9]},
    "adafactor": {"lr": 1e-2},
}
TORCH = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "adafactor": torch.optim.Adafactor,
}
CELLS = [(name, engine) for name in ("adamw", "adam", "sgd", "lion") for engine in ("ddp", "zero2")]
CELLS += [("lion", "fsdp2")]
CELLS += [pytest.param(name, "fsdp2", marks=pytest.mark.slow) for name in ("adamw", "adam", "sgd")]


def reference(name):
    """The weights after three steps of plain torch; matrices decay, vectors do not."""
    model = tiny_llama()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = TORCH[name](groups, **SECTIONS[name])
    for _ in range(STEPS):
        optimizer.zero_grad()
        oracle(model, D8)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "engine"), [*CELLS, ("adafactor", "ddp")])
def test_three_steps_equal_plain_torch(world, tmp_path, name, engine):
    expected = reference(name)
    for final in world(three_steps, 2, name, engine, tmp_path):
        assert largest_difference(final, expected) <= 1e-5


def three_steps(name, engine, out):
    optimizer = {"name": name, "weight_decay": DECAY, **SECTIONS[name]}
    trainer = make_trainer(engine, out, optimizer=optimizer, run={"max_steps": STEPS})
    trainer.train()
    return weights(trainer)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "ddp"])
def test_adafactor_is_refused_where_matrices_are_sharded(tmp_path, engine):
    with pytest.raises(ConfigError, match="adafactor looks at whole matrices, and (ZeRO|FSDP2) shards them"):
        load_config(run_config(engine, tmp_path) | {"optimizer": {"name": "adafactor"}})
