"""bf16 computes; masters, moments, accumulation and reduction stay fp32 unless a key says otherwise."""

import pytest
import torch
from torch import nn

from ds_trainer.callbacks.base import Callback
from tests.helpers.runs import D8, EACH_ENGINE, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama

BF16 = {"dtype": "bf16"}


@pytest.mark.case("G1")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_masters_and_moments_are_fp32_after_the_first_step_in_bf16(world, tmp_path, engine):
    names = {name for name, _ in tiny_llama().named_parameters()}
    results = world(dtypes_of_state, 2, engine, tmp_path)
    assert set().union(*(dtypes for dtypes, _ in results)) == names, "every parameter is owned by a rank"
    for dtypes, compute_dtype in results:
        assert compute_dtype == "bf16"
        for name, of in dtypes.items():
            assert {"master", "exp_avg", "exp_avg_sq"} <= of.keys(), name
            assert set(of.values()) == {torch.float32}, name


def dtypes_of_state(engine, out):
    model = tiny_llama().bfloat16()
    trainer = make_trainer(engine, out, model=model, precision=BF16, optimizer={"name": "adamw", "lr": 1e-3})
    trainer.train()
    dtypes = {name: {key: t.read().dtype for key, t in of.items()} for name, of in trainer.engine.state().items()}
    return dtypes, trainer.run.facts.compute_dtype


@pytest.mark.case("B1", "B8")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_the_loss_and_the_norm_in_bf16_are_those_of_one_process_in_fp32(world, tmp_path, engine):
    loss, norm, _ = oracle(tiny_llama(), D8)
    for got in world(one_step, 2, engine, tmp_path):
        assert got == pytest.approx((loss, norm), rel=2e-2)
        # Roundings of the loss may cancel: on one kind of CPU they do to 1e-8. The norm is a sum of squares.
        assert got[1] != pytest.approx(norm, rel=1e-6), "bf16 must act"


def one_step(engine, out):
    state = make_trainer(engine, out, precision=BF16).train()
    return state.loss, state.grad_norm


class Scale(nn.Module):
    """One weight per column: its gradient is the sum of that column's inputs, whatever it holds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return {"logits": x * self.weight}


def mean_logit(outputs, labels, num_items_in_batch):
    return outputs["logits"].float().sum() / num_items_in_batch


def stack(rows):
    return {"x": torch.tensor(rows)[:, None].expand(-1, 64), "labels": torch.zeros(len(rows), dtype=torch.long)}


SCALE = {"data_collator": stack, "compute_loss_func": mean_logit}


@pytest.mark.case("G1")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_small_steps_move_the_masters_where_they_would_not_move_bf16_weights(world, tmp_path, engine):
    lr, steps = 1e-5, 50
    one = torch.ones((), dtype=torch.bfloat16)
    assert one - lr == one
    for final in world(many_small_steps, 2, engine, tmp_path, lr, steps):
        # Adam's step is the learning rate where the gradient is constant.
        torch.testing.assert_close(final, torch.full((64,), 1 - lr * steps), atol=1e-6, rtol=0)


def many_small_steps(engine, out, lr, steps):
    trainer = make_trainer(
        engine,
        out,
        model=Scale().bfloat16(),
        rows=[1e-3] * 8,
        given=SCALE,
        precision=BF16,
        batch={"micro_size": 4},
        optimizer={"name": "adamw", "lr": lr},
        run={"max_steps": steps},
    )
    trainer.train()
    return weights(trainer)["weight"]


class Gradient(Callback):
    value = 0.0

    def on_pre_optimizer_step(self, trainer):
        ((_, grad),) = trainer.engine.full_gradients()
        assert torch.equal(grad, grad[:1].expand(64))
        self.value = grad[0].item()


SMALL = 2.0**-10
"""Exact in bf16, and lost in it when added to 1."""
COUNT = 64


@pytest.mark.case("G2")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_no_bit_of_a_micro_batch_is_lost_in_accumulation_and_reduction(world, tmp_path, engine):
    for got in world(accumulate, 2, engine, tmp_path, BF16):
        assert got * COUNT == pytest.approx(1 + (COUNT - 1) * SMALL, rel=1e-6)


@pytest.mark.case("G2")
def test_accumulation_in_bf16_is_had_by_asking_for_it(world, tmp_path):
    for got in world(accumulate, 2, "zero2", tmp_path, BF16 | {"grad_dtype": "bf16"}):
        assert got * COUNT < 1 + (COUNT / 2 + 4) * SMALL, "the first rank's small gradients are lost"


def accumulate(engine, out, precision):
    gradient = Gradient()
    make_trainer(
        engine,
        out,
        model=Scale(),
        rows=[1.0] + [SMALL] * (COUNT - 1),
        given=SCALE | {"callbacks": [gradient]},
        precision=precision,
        batch={"global_size": COUNT, "micro_size": 1},
    ).train()
    return gradient.value
