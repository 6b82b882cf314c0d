"""With `checkpoint.load_best_model_at_end` the model in memory is the best one after `train()`, and only then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ds_trainer.callbacks.base import Callback
from ds_trainer.errors import CheckpointError
from tests.helpers.runs import D8, ENGINES, largest_difference, make_trainer, weights
from tests.helpers.tiers import tiers

SCORES = {1: 5, 2: 1, 3: 2, 4: 3}
"""The best model is that of step 2 of 4."""
ADAMW = {"name": "adamw", "lr": 1e-2, "max_grad_norm": 0.0}


class Watch(Callback):
    """Weights and evaluation loss of each step; `save_model` is called in the third."""

    def __init__(self, folder):
        self.folder, self.weights, self.losses = folder, {}, {}

    def on_step_end(self, trainer):
        step = trainer.state.global_step
        self.weights[step] = weights(trainer)
        if step == 3:
            trainer.save_model(self.folder)

    def on_evaluate(self, trainer, metrics):
        self.losses.setdefault(metrics.step, metrics.eval_loss)


def best_of_four(engine, out, dtype="fp32", callbacks=(), scores=SCORES, resume=None, steps=4, given=None, **sections):
    left = iter([scores[step] for step in sorted(scores)])
    metrics = {"compute_metrics": lambda prediction: {"score": next(left)}, "eval_dataset": D8[:2]}
    sections = {
        "optimizer": ADAMW,
        "precision": {"dtype": dtype},
        "run": {"max_steps": steps, "epochs": None},
        "evaluation": {"every_steps": 1, "metric_for_best_model": "score", "greater_is_better": False},
        "checkpoint": {"load_best_model_at_end": True, "export": True, "resume": resume}
        | {"every_steps": 3, "keep_last": 1},
    } | sections
    return make_trainer(engine, out, given=metrics | {"callbacks": list(callbacks)} | (given or {}), **sections)


def train(engine, out, dtype, sections):
    watch = Watch(out / "third")
    trainer = best_of_four(engine, out, dtype, [watch], {**SCORES, 5: 0}, **sections)
    state = trainer.train()
    assert (state.best_global_step, state.global_step) == (2, 4)
    after, loss = weights(trainer), trainer.evaluate()["eval_loss"]
    trainer.save_model(out / "again")
    trainer.close()
    return watch.weights, watch.losses, after, loss


def check(world, out, engine, dtype="fp32", ranks=2, **sections):
    at_step, losses, after, loss = world(train, ranks, engine, out, dtype, sections)[0]
    assert len(set(losses.values())) == 4, "each step must change the loss"
    assert largest_difference(after, at_step[2]) == 0, "the masters are those of step 2"
    assert loss == losses[2], "what the forward pass uses is made of them"
    for name, step in (("third", 3), ("model", 2), ("again", 2)):
        exported = AutoModelForCausalLM.from_pretrained(out / name)
        assert largest_difference(dict(exported.named_parameters()), at_step[step]) == 0, name


@pytest.mark.case("N7", "L5")
@pytest.mark.parametrize("engine", tiers(ENGINES, quick=("zero2", "fsdp2")))
def test_the_model_in_memory_is_what_is_evaluated_and_saved(world, tmp_path, engine):
    check(world, tmp_path, engine)


@pytest.mark.case("N7")
@pytest.mark.parametrize("engine", tiers(("zero1", "zero3", "fsdp2", "ddp"), quick=("zero3",)))
def test_what_is_computed_in_bf16_is_made_of_the_best_masters(world, tmp_path, engine):
    check(world, tmp_path, engine, "bf16")


@pytest.mark.slow
@pytest.mark.case("N7")
@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, {"pp": 2, "schedule": "1f1b"}], ids=["tensor_parallel", "pipeline_with_a_tied_head"]
)
@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_every_rank_of_a_split_model_gets_its_part(world, tmp_path, engine, parallel):
    keys = {"ddp": {"engine": "ddp"}, "zero1": {}}[engine]
    check(world, tmp_path, engine, parallel=keys | parallel, batch={"global_size": 8, "micro_size": 1})


def interrupted(out, engine="zero2"):
    """Ends after three of four steps, as by a run's limit."""
    trainer = best_of_four(engine, out, scores={1: 5, 2: 1, 3: 2}, steps=3)
    trainer.train()
    trainer.close()


def resumed(start, out, folder):
    os.chdir(start)
    trainer = best_of_four("zero2", Path(out), scores={3: 2, 4: 3, 5: 3}, resume=folder)
    best = trainer.state.best_model_checkpoint
    state = trainer.train()
    trainer.close()
    return state.global_step, best


@pytest.mark.case("N8")
def test_the_best_model_is_found_where_the_output_folder_has_been_moved_to(world, tmp_path):
    first, second = tmp_path / "first", tmp_path / "moved" / "there"
    first.mkdir()
    world(interrupted, 1, first)
    second.parent.mkdir()
    shutil.move(first, second)
    ((step, best),) = world(resumed, 1, second.parent, "there", "auto")
    assert (step, best) == (4, "there/checkpoint-2")
    AutoModelForCausalLM.from_pretrained(second / "model")
    third = tmp_path / "third"
    ((step, best),) = world(resumed, 1, tmp_path, "third", str(second / "checkpoint-4"))
    assert (step, best) == (4, str(second / "checkpoint-2"))
    AutoModelForCausalLM.from_pretrained(third / "model")


def refused(out):
    with pytest.raises(CheckpointError) as caught:
        best_of_four("ddp", out, resume="auto", optimizer=ADAMW)
    return str(caught.value), caught.value.on_all_ranks


@pytest.mark.case("N8")
def test_a_best_model_that_is_gone_is_missed_before_the_first_step(world, tmp_path):
    world(interrupted, 2, tmp_path, "ddp")
    shutil.rmtree(tmp_path / "checkpoint-2")
    for text, agreed in world(refused, 2, tmp_path):
        assert agreed and "checkpoint-2 is not there" in text and "checkpoint.load_best_model_at_end" in text
