"""Rope types whose frequencies depend on a sequence's length: the loss does not depend on how the batch is divided."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers.rope import ROPES, rope_model, rope_rows
from tests.helpers.runs import largest_difference, make_trainer, weights

CELLS = {
    "ddp, micro 1": {"batch": {"global_size": 4, "micro_size": 1}},
    "ddp, micro 2": {"batch": {"global_size": 4, "micro_size": 2}},
    "tp": {"batch": {"global_size": 4, "micro_size": 4}, "parallel": {"engine": "ddp", "tp": 2}},
    "pp": {"batch": {"global_size": 4, "micro_size": 2}, "parallel": {"engine": "ddp", "pp": 2}},
}


def each_alone(model, rows):
    """Loss and gradients of samples that never meet in a batch; a copy each, since `dynamic` remembers lengths."""
    total = sum(label != -100 for row in rows for label in row["labels"][1:])
    loss, gradients = 0.0, {}
    for row in rows:
        alone = copy.deepcopy(model)
        logits = alone(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        part = cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum") / total
        part.backward()
        loss += part.item()
        for name, parameter in alone.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad
    return loss, gradients


@pytest.mark.case("K4")
@pytest.mark.parametrize("kind", ROPES)
def test_loss_and_weights_are_those_of_each_sample_alone(world, tmp_path, kind):
    model = rope_model(kind)
    loss, gradients = each_alone(model, rope_rows())
    expected = {name: p.detach() - 0.01 * gradients[name] for name, p in model.named_parameters()}
    for cells in world(divided, 2, tmp_path, kind):
        for name, (got_loss, evaluated, got_weights) in cells.items():
            assert (got_loss, evaluated) == pytest.approx((loss, loss), rel=2e-6), name
            assert largest_difference(got_weights, expected) <= 2e-6, name


def divided(out, kind):
    found = {}
    for name, sections in CELLS.items():
        trainer = make_trainer(
            "ddp",
            out,
            model=rope_model(kind),
            rows=rope_rows(),
            given={"eval_dataset": rope_rows()},
            evaluation={"batch_size": 2},
            optimizer={"lr": 0.01},
            **sections,
        )
        evaluated = trainer.evaluate()["eval_loss"]
        found[name] = trainer.train().loss, evaluated, weights(trainer)
        trainer.close()
    return found
