"""Checkpoints of a pipeline: each element is saved once, runs go on from them bit for bit, and they become models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_trainer.cli import main
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.resume_model_parallel import SAVED, STEPS, check_each_element_is_saved_once, refused, train
from tests.helpers.runs import largest_difference, make_trainer
from tests.helpers.tiers import tiers

MODEL = ("llama_tied", {"vocab_size": 321, "num_hidden_layers": 4, "attention_dropout": 0.1})
BATCH = {"global_size": 8, "micro_size": 1}
LAYOUTS = {
    "ddp": ("ddp", {"pp": 2}),
    "ddp-zbv": ("ddp", {"pp": 2, "schedule": "zbv"}),
    "fsdp2": ("fsdp2", {"pp": 2}),
    "fsdp2-interleaved": ("fsdp2", {"pp": 2, "schedule": "interleaved_1f1b"}),
    "zero0": ("zero0", {"pp": 2}),
    "zero1": ("zero1", {"pp": 2}),
    "zero1-cpu": ("zero1-cpu", {"pp": 2}),
    "zero1-tp": ("zero1", {"pp": 2, "tp": 2}),
    "fsdp2-tp": ("fsdp2", {"pp": 2, "tp": 2, "sequence_parallel": True}),
}
SLOW = ["ddp-zbv", "fsdp2-interleaved", "zero1-cpu", "fsdp2-tp"]


@pytest.mark.case("C2", "I8")
@pytest.mark.parametrize(
    "layout", tiers(LAYOUTS, quick=["zero1"], slow=["ddp-zbv", "fsdp2-interleaved", "zero1-cpu", "fsdp2-tp"])
)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_that_holds_each_element_once(world, tmp_path, layout):
    """4 ranks; dropout, clipping off, AdamW; the tied weight is the first stage's and not in the last one's files."""
    cell, keys = LAYOUTS[layout]
    model = make_checkpoint(tmp_path / "source", MODEL[0], **MODEL[1])
    straight = world(train, 4, tmp_path / "straight", model, cell, keys, {}, BATCH)
    saved = tmp_path / "straight" / f"checkpoint-{SAVED}"
    whole = straight[0][3]
    assert all(largest_difference(other[3], whole) == 0 for other in straight)
    check_each_element_is_saved_once(saved, whole)
    resumed = world(train, 4, tmp_path / "cut", model, cell, keys, {"resume": str(saved)}, BATCH)
    for (_, losses, state, _), ((step, _), later_losses, later_state, _) in zip(straight, resumed, strict=True):
        assert step == SAVED
        assert later_losses == losses
        assert later_state == state


@pytest.mark.case("D11", "I2")
@pytest.mark.parametrize("layout", tiers(["ddp", "fsdp2-interleaved", "zero1-tp"], slow=["zero1-tp"]))
def test_one_command_makes_a_model_of_a_pipelines_checkpoint_in_one_process(world, tmp_path, layout):
    cell, keys = LAYOUTS[layout]
    model = make_checkpoint(tmp_path / "source", MODEL[0], **MODEL[1])
    saved = world(train, 4, tmp_path / "run", model, cell, keys, {}, BATCH)[0][3]
    folder = tmp_path / "run" / f"checkpoint-{STEPS}"
    assert main(["export", str(folder), "--out", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert largest_difference(dict(exported.named_parameters()), saved) == 0


@pytest.mark.slow
@pytest.mark.case("I2")
def test_in_another_pipeline_its_weights_are_offered_and_are_those_that_were_saved(world, tmp_path):
    model = make_checkpoint(tmp_path / "source", MODEL[0], **MODEL[1])
    saved = world(train, 4, tmp_path / "run", model, "zero1", {"pp": 2}, {}, BATCH)[0][3]
    only = {"resume": str(tmp_path / "run" / f"checkpoint-{STEPS}"), "resume_weights_only": True}
    for text in world(refused, 4, tmp_path / "run", model, "ddp", {"pp": 4}, {"resume": "auto"}, BATCH):
        assert "was saved by pp 2, 2 data ranks" in text and "this run is pp 4, 1 data ranks" in text
        assert "checkpoint.resume_weights_only" in text
    for name, keys in (("deeper", {"pp": 4}), ("flat", {})):
        ((step, began), *_), *_ = world(train, 4, tmp_path / name, model, "ddp", keys, only, BATCH)
        assert step == 0
        assert largest_difference(began, saved) == 0


def export(out, model: str, keys: dict, engine: str = "ddp"):
    trainer = make_trainer(
        engine, out, model=model, batch={"global_size": 8, "micro_size": 1}, parallel=keys, checkpoint={"export": True}
    )
    trainer.train()
    trainer.close()


@pytest.mark.case("D3", "D11")
@pytest.mark.parametrize("kind", ["llama_tied", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_export_holds_the_keys_and_values_of_one_process(world, tmp_path, kind):
    from safetensors.torch import load_file

    model = make_checkpoint(tmp_path / "source", kind, num_hidden_layers=4)
    world(export, 1, tmp_path / "one", model, {"engine": "ddp"})
    world(export, 2, tmp_path / "two", model, {"engine": "ddp", "pp": 2, "schedule": "interleaved_1f1b"})
    one, two = (tmp_path / name / "model" for name in ("one", "two"))
    expected, got = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert ("lm_head.weight" in got) == (kind == "llama")
    assert largest_difference(got, expected) < 1e-5
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
    assert (one / "config.json").read_text() == (two / "config.json").read_text()
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (one, two)]
    assert sizes[0] == sizes[1]
