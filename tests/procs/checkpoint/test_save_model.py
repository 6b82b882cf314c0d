"""What `save_model` writes is what transformers would have written of the live model, on every engine."""

import json
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from ds_trainer.callbacks.base import Callback
from ds_trainer.errors import ConfigError, MachineError
from tests.helpers.runs import EACH_ENGINE, ENGINES, make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import tiny_llama

IDS = [[5, 9, 33, 2, 60, 17]]


class SaveAfter(Callback):
    def __init__(self, step, folder):
        self.step, self.folder = step, folder

    def on_step_end(self, trainer):
        if trainer.state.global_step == self.step:
            trainer.save_model(self.folder)


@pytest.mark.case("D1", "D3")
@pytest.mark.parametrize(
    ("engine", "ties"),
    tiers(product(ENGINES, ["tied", "untied"]), quick=[("zero3", "tied"), ("zero2", "untied"), ("fsdp2", "tied")]),
)
def test_the_folder_loads_whole_and_computes_what_the_live_model_did(world, tmp_path, engine, ties):
    tied = ties == "tied"
    tiny_llama(tied=tied).save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ("lm_head.weight" in theirs) != tied
    live = world(train_and_save, 2, engine, tmp_path, tied)[0]
    logits = {}
    for name in ("first", "model"):
        ours = load_file(tmp_path / name / "model.safetensors")
        assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
        assert json.loads((tmp_path / name / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        model, found = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            logits[name] = model.eval()(torch.tensor(IDS)).logits
    torch.testing.assert_close(logits["model"], live, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(logits["first"], live, atol=1e-3), "the first was saved a step before"


def train_and_save(engine, out, tied):
    trainer = make_trainer(
        engine,
        out,
        model=tiny_llama(tied=tied),
        given={"callbacks": [SaveAfter(1, out / "first")]},
        run={"max_steps": 2},
        checkpoint={"export": True},
    )
    trainer.train()
    trainer.engine.module.eval()
    with torch.no_grad():
        return trainer.engine.forward(input_ids=torch.tensor(IDS)).logits


@pytest.mark.case("D1")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_bf16_export_holds_the_rounded_masters_bit_for_bit(world, tmp_path, engine):
    masters = world(train_in_bf16, 2, engine, tmp_path)[0]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], master.bfloat16()) for name, master in masters.items())


def train_in_bf16(engine, out):
    trainer = make_trainer(
        engine, out, model=tiny_llama().bfloat16(), precision={"dtype": "bf16"}, checkpoint={"export": True}
    )
    trainer.train()
    return weights(trainer)


@pytest.mark.case("L3")
@pytest.mark.parametrize("engine", tiers(("ddp", "zero2", "fsdp2")))
def test_a_model_in_wrappers_of_torch_is_exported_as_the_same_one_without(world, tmp_path, engine):
    world(train_wrapped, 2, engine, tmp_path)
    exports = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "layers", "whole")]
    for wrapped in exports[1:]:
        assert wrapped.keys() == exports[0].keys()
        for name, value in exports[0].items():
            torch.testing.assert_close(wrapped[name], value, rtol=1e-5, atol=1e-5)


def train_wrapped(engine, out):
    for name, wrap in (("plain", lambda model: model), ("layers", wrap_layers), ("whole", wrap_whole)):
        trainer = make_trainer(engine, out / name, model=wrap(tiny_llama()), checkpoint={"export": True})
        trainer.train()
        trainer.close()


def wrap_layers(model):
    first, second = model.model.layers
    model.model.layers[0], model.model.layers[1] = checkpoint_wrapper(first), torch.compile(second, backend="eager")
    return model


def wrap_whole(model):
    return torch.compile(model, backend="eager")


@pytest.mark.case("L3")
def test_compiled_layers_are_refused_where_their_parameters_are_gathered_by_hooks(world, tmp_path):
    assert world(refuse_compiled_layers, 1, tmp_path) == [True]


def refuse_compiled_layers(out):
    with pytest.raises(ConfigError, match="compiled by torch.compile, with zero.stage = 3") as caught:
        make_trainer("zero3", out, model=wrap_layers(tiny_llama()))
    return "model.compile" in caught.value.change


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_a_folder_that_cannot_be_written_ends_every_rank_at_once(world, tmp_path, engine):
    (tmp_path / "file").write_text("in the way")
    for text, seconds in world(save_in_a_file, 2, engine, tmp_path):
        assert "cannot be written" in text and "run.output_dir" in text
        assert seconds < 10


def save_in_a_file(engine, out):
    trainer = make_trainer(engine, out)
    began = time.monotonic()
    with pytest.raises(MachineError) as caught:
        trainer.save_model(Path(out, "file", "model"))
    return str(caught.value), time.monotonic() - began
