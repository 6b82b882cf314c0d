"""Checkpoints under tensor parallelism: each element is saved once, and a run goes on from them bit for bit."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_trainer.cli import main
from ds_trainer.log import get_logger
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.layouts import CELLS
from tests.helpers.resume_model_parallel import SAVED, STEPS, check_each_element_is_saved_once, refused, train
from tests.helpers.runs import largest_difference
from tests.helpers.tiers import tiers

ODD = ("llama_tied", {"vocab_size": 321, "num_key_value_heads": 1, "attention_dropout": 0.1})
"""A vocabulary with a row of padding, and one KV head, of which each tensor rank has a copy."""


@pytest.mark.case("I7", "C2")
@pytest.mark.parametrize("cell", tiers(CELLS, slow=["zero1", "ddp", "zero2", "zero3-cpu-params", "fsdp2"]))
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_that_holds_each_element_once(world, tmp_path, cell):
    model = make_checkpoint(tmp_path / "source", ODD[0], **ODD[1])
    straight = world(train, 4, tmp_path / "straight", model, cell, {"tp": 2}, {})
    saved = tmp_path / "straight" / f"checkpoint-{SAVED}"
    check_each_element_is_saved_once(saved, straight[0][3])
    resumed = world(train, 4, tmp_path / "cut", model, cell, {"tp": 2}, {"resume": str(saved)})
    for (_, losses, state, _), ((step, _), later_losses, later_state, _) in zip(straight, resumed, strict=True):
        assert step == SAVED
        assert later_losses == losses
        assert later_state == state


ANOTHER_TP = [("zero2", 4, "ddp", 4), ("ddp", 1, "zero3", 2), ("fsdp2", 2, "zero1", 1), ("ddp", 2, "fsdp2", 4)]


@pytest.mark.case("I2", "I7")
@pytest.mark.parametrize(("before", "tp", "after", "later_tp"), tiers(ANOTHER_TP, slow=ANOTHER_TP[1:3]))
def test_at_another_tp_its_weights_are_offered_and_are_those_that_were_saved(
    world, tmp_path, before, tp, after, later_tp
):
    model = make_checkpoint(tmp_path / "source", ODD[0], **ODD[1])
    ((_, _, _, saved), *_) = world(train, 4, tmp_path / "run", model, before, {"tp": tp}, {})
    keys, auto = {"tp": later_tp}, {"resume": "auto"}
    for text in world(refused, 4, tmp_path / "run", model, after, keys, auto):
        assert f"was saved by {words(before, tp)}" in text
        assert f"this run is {words(after, later_tp)}" in text
        assert "checkpoint.resume_weights_only" in text
    only = auto | {"resume_weights_only": True}
    ((step, began), *_), *_ = world(train, 4, tmp_path / "run", model, after, keys, only)
    assert step == 0
    assert largest_difference(began, saved) == 0


def warned(out, model, keys, checkpoint):
    """Losses of a run that goes on, and the warnings that it began with."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    get_logger().addHandler(handler)
    return train(out, model, "ddp", keys, checkpoint)[1], said


@pytest.mark.slow
def test_a_run_goes_on_with_sequence_parallelism_and_says_what_that_changes(world, tmp_path):
    model = make_checkpoint(tmp_path / "source", "llama")
    straight = world(train, 2, tmp_path / "straight", model, "ddp", {"tp": 2}, {})[0][1]
    keys, resume = {"tp": 2, "sequence_parallel": True}, {"resume": str(tmp_path / "straight" / f"checkpoint-{SAVED}")}
    losses, said = world(warned, 2, tmp_path / "cut", model, keys, resume)[0]
    assert losses == pytest.approx(straight, rel=1e-4)
    was, now = (f"tp 2{more}, 1 data ranks, ddp" for more in ("", " with sequence parallelism"))
    assert any(f"was saved by {was}" in text and f"goes on with {now}" in text for text in said), said


def words(cell, tp):
    return f"tp {tp}, {4 // tp} data ranks" if tp > 1 else "4 data ranks"


@pytest.mark.slow
def test_one_process_goes_on_from_the_weights_and_exports_them(world, tmp_path):
    model = make_checkpoint(tmp_path / "source", ODD[0], **ODD[1])
    saved = world(train, 4, tmp_path / "run", model, "zero1", {"tp": 2}, {})[0][3]
    folder = tmp_path / "run" / f"checkpoint-{STEPS}"
    only = {"resume": str(folder), "resume_weights_only": True}
    ((_, began), *_), *_ = world(train, 1, tmp_path / "alone", model, "ddp", {}, only)
    assert largest_difference(began, saved) == 0
    assert main(["export", str(folder), "--out", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert exported.lm_head.weight.shape[0] == ODD[1]["vocab_size"]
    assert largest_difference(dict(exported.named_parameters()), saved) == 0
