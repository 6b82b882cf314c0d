"""Engines are plug-ins: one that is installed is found by its name, and a name that nothing answers to is refused."""

import sys

import pytest

from ds_trainer.config.io import load_config
from ds_trainer.engines.base import Engine, engine_names
from ds_trainer.errors import ConfigError
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama


@pytest.fixture
def installed(tmp_path):
    """A folder as pip would leave it after installing a distribution with the toy engine."""
    folder = tmp_path / "site-packages"
    info = folder / "toy_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ds_trainer.engines]\ntoy = tests.helpers.toy_engine:ToyEngine\n")
    return folder


def test_an_installed_engine_is_found_by_name_and_trains(world, tmp_path, installed):
    model = tiny_llama()
    loss, norm, gradients = oracle(model, D8)
    expected = {name: p.detach() - gradients[name] for name, p in model.named_parameters()}
    (result,) = world(train_with_toy, 1, tmp_path, str(installed))
    got_loss, got_norm, final, names, windows = result
    assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-6)
    assert largest_difference(final, expected) <= 1e-6
    assert names == ["accelerate", "ddp", "deepspeed", "fsdp2", "toy"]
    assert windows == [False, False, False, True]


def train_with_toy(out, installed):
    sys.path.insert(0, installed)
    trainer = make_trainer("ddp", out, parallel={"engine": "toy"})
    assert type(trainer.engine).__name__ == "ToyEngine" and isinstance(trainer.engine, Engine)
    state = trainer.train()
    trainer.save_model(out / "model")
    return state.loss, state.grad_norm, weights(trainer), engine_names(), trainer.engine.windows


def test_what_every_engine_offers_is_enough_to_save_and_resume_one(world, tmp_path, installed):
    (straight,) = world(train_toy_to, 1, tmp_path / "straight", str(installed), 4, None)
    world(train_toy_to, 1, tmp_path / "cut", str(installed), 2, None)
    (resumed,) = world(train_toy_to, 1, tmp_path / "cut", str(installed), 4, "auto")
    assert largest_difference(resumed[0], straight[0]) == 0
    assert resumed[1] == straight[1] == [False, False, False, True] * 4


def train_toy_to(out, installed, steps, resume):
    sys.path.insert(0, installed)
    checkpoint = {"every_steps": 2, "resume": resume}
    run = {"max_steps": steps, "epochs": 9}
    trainer = make_trainer("ddp", out, parallel={"engine": "toy"}, checkpoint=checkpoint, run=run)
    trainer.train()
    return weights(trainer), trainer.engine.windows


def test_a_misspelt_engine_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError) as caught:
        load_config({"parallel": {"engine": "deepsped"}})
    assert 'parallel.engine is "deepsped"' in str(caught.value)
    assert "ddp, deepspeed" in str(caught.value)
