"""Evaluation and prediction: the data set's token mean and its logits in order, whatever the number of ranks."""

import numpy as np
import pytest
import torch

from tests.helpers.runs import D8, EACH_ENGINE, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama

CELLS = [(engine, ranks) for engine in ("ddp", "zero2", "zero3") for ranks in (1, 2)]
ODD = D8[3:6]
"""Three samples: with micro-batches of 2 the second rank's one is short, and of five it has none."""


@pytest.mark.parametrize(("engine", "ranks"), CELLS)
def test_the_loss_is_the_token_mean_of_the_data_set(world, tmp_path, engine, ranks):
    results = world(evaluate, ranks, engine, tmp_path)
    for n in (3, 5, 8):
        expected = oracle(tiny_llama(), D8[:n])[0]
        for by_size in results:
            assert by_size[n] == pytest.approx(expected, rel=1e-6)


def evaluate(engine, out):
    trainer = make_trainer(engine, out, given={"eval_dataset": D8})
    whole = trainer.evaluate()["eval_loss"]
    assert trainer.state.log_history[-1].eval_num_tokens == sum(i != -100 for row in D8 for i in row["labels"][1:])
    return {8: whole} | {n: trainer.predict(D8[:n]).metrics["test_loss"] for n in (3, 5)}


@pytest.mark.parametrize(("engine", "ranks"), CELLS)
def test_predictions_are_the_models_logits_in_the_data_sets_order_on_every_rank(world, tmp_path, engine, ranks):
    model = tiny_llama().eval()
    longest = max(len(row["input_ids"]) for row in ODD)
    for logits, labels, metrics, seen in world(predict, ranks, engine, tmp_path):
        assert logits.shape == (3, longest, 65) and labels.shape == (3, longest)
        for i, row in enumerate(ODD):
            length = len(row["input_ids"])
            with torch.no_grad():
                expected = model(torch.tensor([row["input_ids"]])).logits[0].numpy()
            np.testing.assert_allclose(logits[i, :length], expected, atol=1e-6)
            assert labels[i].tolist() == row["labels"] + [-100] * (longest - length)
        assert metrics["test_samples"] == 3.0
        assert metrics["test_loss"] == pytest.approx(oracle(tiny_llama(), ODD)[0], rel=1e-6)
        assert seen == {"eval_loss", "eval_samples"}


def predict(engine, out):
    given = {"eval_dataset": ODD, "compute_metrics": lambda p: {"samples": len(p.predictions)}}
    trainer = make_trainer(engine, out, given=given)
    output = trainer.predict(ODD)
    return output.predictions, output.label_ids, output.metrics, set(trainer.evaluate())


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_evaluating_between_steps_does_not_change_the_training(world, tmp_path, engine):
    with_evaluation, without, calls = world(train_twice, 2, engine, tmp_path)[0]
    assert calls == 3
    assert all(torch.equal(with_evaluation[name], without[name]) for name in without)


def train_twice(engine, out):
    finals, evaluations = [], 0
    for every in (1, None):
        trainer = make_trainer(
            engine,
            out,
            given={"eval_dataset": ODD},
            evaluation={"every_steps": every, "at_end": False} if every else {"at_end": False},
            optimizer={"name": "adamw", "lr": 1e-2},
            run={"max_steps": 3},
        )
        history = trainer.train().log_history
        evaluations += sum(hasattr(line, "eval_loss") for line in history)
        finals.append(weights(trainer))
        trainer.close()
    return *finals, evaluations
