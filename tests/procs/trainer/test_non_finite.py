"""A NaN or infinite loss or gradient never reaches a weight, and every rank ends or goes on together."""

from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

from ds_trainer.errors import NonFiniteError
from tests.helpers.runs import ENGINES, make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import samples, tiny_llama

MARK = 64
"""A label that no other sample has."""
BF16 = {"precision": {"dtype": "bf16"}}
CPU_OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}}
SECTIONS = {"fp32": {}, "bf16": BF16, "cpu": CPU_OFFLOAD}
CELLS = [*product(ENGINES, ["fp32", "bf16"]), *product(["zero1", "zero2", "zero3"], ["cpu"])]
QUICK = [("ddp", "fp32"), ("fsdp2", "bf16"), ("zero2", "cpu"), ("zero3", "fp32")]


def rows(marked, n=24):
    """Steps of 8 samples; those with a number in `marked` have the mark among their labels."""
    out = samples(n, vocab=MARK)
    return [row | {"labels": [*row["labels"][:-1], MARK]} if i in marked else row for i, row in enumerate(out)]


def mean(outputs, labels, num_items_in_batch):
    logits = outputs.logits.float()[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def nan_everywhere(outputs, labels, num_items_in_batch):
    """NaN at the mark, in the loss and through it in every gradient."""
    return mean(outputs, labels, num_items_in_batch) * (torch.nan if (labels == MARK).any() else 1.0)


def infinite_loss_alone(outputs, labels, num_items_in_batch):
    """Infinite at the mark, with gradients that are finite."""
    return mean(outputs, labels, num_items_in_batch) + (torch.inf if (labels == MARK).any() else 0.0)


LOSSES = {f.__name__: f for f in (nan_everywhere, infinite_loss_alone)}


def run_until_error(trainer):
    """The error, or None, and the weights before the last step and after it."""
    before = weights(trainer)
    try:
        for _ in range(trainer.state.max_steps):
            before = weights(trainer)
            trainer.train_step()
    except NonFiniteError as error:
        return error, before, weights(trainer)
    return None, before, weights(trainer)


@pytest.mark.parametrize(("engine", "sections"), tiers(CELLS, quick=QUICK))
def test_a_loss_that_is_not_finite_stops_every_rank_and_names_step_rank_and_samples(world, tmp_path, engine, sections):
    texts = world(stop_on_loss, 2, engine, tmp_path, SECTIONS[sections])
    assert texts[0] == texts[1]
    # Step 2 begins at sample 8, and rank 1 takes the second pair of it.
    assert "the loss of step 2 is not finite (rank 1, samples [[10, 11]])" in texts[0]
    assert "the weights are those after step 1" in texts[0]


def stop_on_loss(engine, out, sections):
    given = {"compute_loss_func": nan_everywhere}
    trainer = make_trainer(engine, out, rows=rows({11}), given=given, run={"max_steps": 3}, **sections)
    error, before, after = run_until_error(trainer)
    assert error.on_all_ranks and trainer.state.global_step == 1
    assert all(torch.equal(after[name], before[name]) for name in before)
    return str(error)


@pytest.mark.parametrize(("engine", "sections"), tiers(CELLS, quick=QUICK))
def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_update(world, tmp_path, engine, sections):
    texts = world(stop_on_gradient, 2, engine, tmp_path, SECTIONS[sections])
    assert texts[0] == texts[1]
    assert (
        "the gradient of step 2 is not finite though its loss is (samples [8, 9, 10, 11, 12, 13, 14, 15])" in texts[0]
    )


def stop_on_gradient(engine, out, sections):
    model = tiny_llama()
    adamw = {"name": "adamw", "lr": 1e-2, "max_grad_norm": 1.0}
    trainer = make_trainer(engine, out, model=model, rows=rows(()), run={"max_steps": 3}, optimizer=adamw, **sections)

    def spoil(module, inputs, output):
        if output.requires_grad and trainer.state.global_step == 1 and not trainer.is_world_process_zero:
            output.register_hook(lambda grad: grad * torch.nan)

    model.model.layers[0].mlp.up_proj.register_forward_hook(spoil)
    error, before, after = run_until_error(trainer)
    assert error.on_all_ranks and trainer.state.global_step == 1 and trainer.state.grad_norm == float("inf")
    assert all(torch.equal(after[name], before[name]) for name in before)
    return str(error)


@pytest.mark.parametrize(
    ("engine", "loss"),
    tiers(product(ENGINES, LOSSES), quick=[("fsdp2", "nan_everywhere"), ("zero3", "infinite_loss_alone")]),
)
def test_skip_drops_the_step_as_if_its_samples_were_not_there(world, tmp_path, engine, loss):
    for skipped, without, state, lines in world(skip_one, 2, engine, tmp_path, loss):
        assert all(torch.equal(skipped[name], without[name]) for name in without)
        assert (state.global_step, state.skipped_steps) == (3, 1)
        assert [line.skipped for line in lines] == [0, 1, 0]
        assert [line.loss is None for line in lines] == [False, True, False]


def skip_one(engine, out, loss):
    data, finals = rows({11}), []
    for part in (data, data[:8] + data[16:]):
        trainer = make_trainer(
            engine,
            out,
            rows=part,
            given={"compute_loss_func": LOSSES[loss]},
            optimizer={"name": "adamw", "lr": 1e-2},
            run={"epochs": 1, "max_steps": 3, "on_non_finite": "skip"},
        )
        state = trainer.train()
        finals.append((weights(trainer), state))
        trainer.close()
    (skipped, state), (without, _) = finals
    return skipped, without, state, state.log_history


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_skip_stops_after_too_many_steps_in_a_row(world, tmp_path, engine):
    for text, steps in world(skip_many, 2, engine, tmp_path):
        # Steps 1 and 3 are spoilt, then 5 to 7: only the last ones are more than two in a row.
        assert "3 steps in a row, up to step 7, were not finite" in text
        assert steps == 6


def skip_many(engine, out):
    trainer = make_trainer(
        engine,
        out,
        rows=rows({0, 16, 32, 40, 48}, n=64),
        given={"compute_loss_func": nan_everywhere},
        run={"max_steps": 8, "on_non_finite": "skip", "max_skipped_steps": 2},
    )
    error, _, _ = run_until_error(trainer)
    return str(error), trainer.state.global_step
