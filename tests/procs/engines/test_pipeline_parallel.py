"""Engines and pipeline stages beyond the parity tests: loss scales, non-finite gradients, parameter groups."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.errors import EngineError
from tests.helpers.overflow import three_steps
from tests.helpers.runs import largest_difference, make_trainer
from tests.helpers.tiny import tiny_llama

SLOW = pytest.mark.slow


def parallel(engine: str) -> dict:
    return {"engine": engine if engine in ("ddp", "fsdp2") else "deepspeed", "pp": 2}


def overflowed(out, engine):
    """Loss scales by step, where in the second one a gradient of stage 1 alone is infinite; whether it acted."""
    run = {"max_steps": 4, "epochs": 4, "on_non_finite": "skip"}
    trainer = make_trainer(engine, out, run=run, parallel=parallel(engine))
    parameter = dict(trainer.run.model.named_parameters()).get("model.layers.1.mlp.up_proj.weight")

    def spoiled(gradient):
        return gradient.index_fill(0, torch.tensor([0]), torch.inf) if trainer.state.global_step == 1 else gradient

    def spoil():
        if engine != "zero1" and parameter is not None:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            local.copy_(spoiled(local))

    if engine == "zero1" and parameter is not None:  # Which cuts and hides what `optimizer_step` reads.
        parameter.register_hook(spoiled)
    return three_steps(trainer, spoil)


@pytest.mark.parametrize(
    "engine",
    ["ddp", pytest.param("fsdp2", marks=SLOW), pytest.param("zero0", marks=SLOW), pytest.param("zero1", marks=SLOW)],
)
def test_an_overflow_on_one_stage_skips_the_step_on_all(world, tmp_path, engine):
    for scales, kept in world(overflowed, 2, tmp_path, engine):
        assert kept == [False, True, False]
        if engine in ("ddp", "fsdp2"):
            assert scales == [2.0**10, 2.0**9, 2.0**9], "the loss scale is halved on all stages"


def with_frozen_norms(out):
    """The first stage trains matrices only."""
    model = tiny_llama(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name.startswith("model.layers.0") and parameter.dim() == 1))
    with pytest.raises(EngineError) as caught:
        make_trainer("zero1", out, model=model, optimizer={"weight_decay": 0.1}, parallel=parallel("zero1"))
    return str(caught.value)


def test_stages_with_other_parameter_groups_are_refused_by_zero_on_every_rank(world, tmp_path):
    for text in world(with_frozen_norms, 2, tmp_path):
        assert "the ranks of a pipeline have 1, 2 parameter groups with trained parameters" in text
        assert "parallel.engine to ddp or fsdp2" in text


def with_unused_parameters(out):
    """A step on which a layer's gates have no gradient, on DDP that allows it: the weights after it."""
    model = tiny_llama(layers=4)
    trainer = make_trainer(
        "ddp", out, model=model, ddp={"find_unused_parameters": True}, parallel=parallel("ddp"), batch={"micro_size": 1}
    )
    mine = dict(trainer.run.model.named_parameters())
    if trainer.run.mesh.grid.dp_rank == 1 and "model.layers.0.mlp.up_proj.weight" in mine:
        mine["model.layers.0.mlp.up_proj.weight"].register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", None)
        )
    trainer.train_step()
    return {name: value.clone() for name, value in mine.items() if value.requires_grad}


@pytest.mark.slow
def test_a_parameter_without_a_gradient_on_one_data_rank_counts_as_zero_there(world, tmp_path):
    first, second, *_ = world(with_unused_parameters, 4, tmp_path)
    assert largest_difference(first, second) == 0.0, "both data ranks have updated alike"
