"""Ranks, steps and data sets without a single token to learn."""

import logging

import pytest
import torch

from ds_trainer.callbacks.base import Callback
from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX
from tests.helpers.runs import D8, EACH_ENGINE, largest_difference, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama


def without_labels(row):
    return row | {"labels": [IGNORE_INDEX] * len(row["labels"])}


RANK_1_EMPTY = [without_labels(row) if i in (2, 3, 6, 7) else row for i, row in enumerate(D8)]
"""Micro-batches of 2 go to the two ranks in turn."""


@pytest.mark.case("B5")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_rank_without_labels_adds_nothing(world, tmp_path, engine):
    model = tiny_llama()
    loss, norm, gradients = oracle(model, RANK_1_EMPTY)
    expected = {name: p.detach() - gradients[name] for name, p in model.named_parameters()}
    for got_loss, got_norm, final in world(rank_without_labels, 2, engine, tmp_path):
        assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-6)
        assert largest_difference(final, expected) <= 1e-6


def rank_without_labels(engine, out):
    trainer = make_trainer(engine, out, rows=RANK_1_EMPTY)
    state = trainer.train()
    return state.loss, state.grad_norm, weights(trainer)


@pytest.mark.case("B5")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_step_without_labels_updates_nothing_and_moves_on(world, tmp_path, engine):
    for rank, (steps, lines, said) in enumerate(world(step_without_labels, 2, engine, tmp_path)):
        assert [step["global_step"] for step in steps] == [1, 2, 3]
        assert [step["empty_steps"] for step in steps] == [0, 1, 1]
        assert [step["loss"] is None for step in steps] == [False, True, False]
        # Momentum and weight decay would both have moved them.
        first, second, third = (step["weights"] for step in steps)
        assert all(torch.equal(second[name], first[name]) for name in first)
        assert all(not torch.equal(third[name], first[name]) for name in first)
        assert [step["lr"] for step in steps] == pytest.approx([1e-2 * share for share in (2 / 3, 1 / 3, 0)])
        assert [line.loss is None for line in lines] == [False, True, False]
        for text in ("step 2 has no label token", "1 of 3 steps had no label token"):
            assert any(text in line for line in said) == (rank == 0)


class AfterEachStep(Callback):
    """What every step left."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, trainer):
        state = trainer.state
        self.steps.append(
            {"global_step": state.global_step, "empty_steps": state.empty_steps, "loss": state.loss}
            | {"lr": trainer.engine.param_groups()[0]["lr"], "weights": weights(trainer)}
        )


def step_without_labels(engine, out):
    after = AfterEachStep()
    trainer = make_trainer(
        engine,
        out,
        rows=[*D8, *map(without_labels, D8), *D8],
        given={"callbacks": [after]},
        optimizer={"name": "adamw", "lr": 1e-2, "weight_decay": 0.5},
        schedule={"name": "linear"},
        run={"max_steps": 3},
    )
    said = listen()
    trainer.train()
    return after.steps, trainer.state.log_history, said


def listen():
    """The texts that this rank writes to its terminal from now on."""
    handler = logging.getLogger("ds_trainer").handlers[0]
    texts: list[str] = []
    handler.emit = lambda record: texts.append(record.getMessage())  # Behind the handler's filter for rank 0.
    return texts


@pytest.mark.case("B5")
def test_a_data_set_without_labels_is_refused_before_the_first_step(world, tmp_path):
    for text in world(data_without_labels, 2, tmp_path):
        assert "0 of 8 samples have supervised tokens" in text
        assert "labels are all -100" in text


def data_without_labels(out):
    given = {"data_collator": None}
    data = {"cache_dir": str(out / "cache")}
    with pytest.raises(DataError) as caught:
        make_trainer("ddp", out, rows=[without_labels(row) for row in D8], given=given, data=data)
    return str(caught.value)
