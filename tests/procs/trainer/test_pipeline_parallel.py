"""What surrounds a step in a pipeline: lengths, short windows, evaluation, predictions, non-finite steps."""

from __future__ import annotations

import math

import pytest
import torch

from ds_trainer.errors import ConfigError, DataError, NonFiniteError, UserError
from tests.helpers.runs import D8, collate, largest_difference, make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import samples, tiny_llama

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b"]
SPLIT_BACKWARD = ["interleaved_zero_bubble", "zbv", "dualpipev"]


def parallel(engine: str = "ddp", **keys) -> dict:
    return {"engine": engine, "pp": 2, **keys}


def step(out, rows, sections: dict, steps: int, batch: dict | None = None):
    """Losses and norms of some steps, and the weights after them."""
    trainer = make_trainer(
        "ddp",
        out,
        model=tiny_llama(layers=4),
        rows=rows,
        batch=batch or {"global_size": 8, "micro_size": 2},
        run={"max_steps": steps},
        optimizer={"lr": 0.1},  # Of 1.0 the fourth step has four times the rounding.
        logging={"every_steps": 1},
        **sections,
    )
    trainer.train()
    lines = [(line.loss, line.grad_norm) for line in trainer.state.log_history]
    return lines, weights(trainer), trainer.state


def close(got, expected):
    for (loss, norm), (one_loss, one_norm) in zip(got[0], expected[0], strict=True):
        assert (loss is None) == (one_loss is None)
        assert [loss or 0.0, norm] == pytest.approx([one_loss or 0.0, one_norm], rel=1e-6)
    assert largest_difference(got[1], expected[1]) < 1e-5


def cases(quick: tuple[str, ...] = ("1f1b",)):
    names = SCHEDULES + SPLIT_BACKWARD
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.case("B4", "I10")
@pytest.mark.parametrize("schedule", cases(("1f1b", "zbv")))
def test_microbatches_of_every_length_make_the_step_of_one_process(world, tmp_path, schedule):
    """Lengths 4 to 60 in micro-batches of one sample: hidden states of eight shapes, then in another order."""
    rows = D8 + D8[::-1]
    batch = {"global_size": 8, "micro_size": 1}
    expected = world(step, 1, tmp_path / "one", rows, {"parallel": {"engine": "ddp"}}, 2, batch)[0]
    for got in world(step, 2, tmp_path / "two", rows, {"parallel": parallel(schedule=schedule)}, 2, batch):
        close(got, expected)


@pytest.mark.case("I9", "I10")
@pytest.mark.parametrize("schedule", cases(()))
def test_the_short_last_step_of_an_epoch_is_that_of_one_process(world, tmp_path, schedule):
    """11 samples in batches of 8: the second step of each epoch has 3, in two micro-batches, the last one of 1."""
    rows = samples(11)
    expected = world(step, 1, tmp_path / "one", rows, {"parallel": {"engine": "ddp"}}, 4)[0]
    for got in world(step, 2, tmp_path / "two", rows, {"parallel": parallel(schedule=schedule)}, 4):
        close(got, expected)


def without_labels(row: dict) -> dict:
    return {"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])}


@pytest.mark.case("B5")
def test_microbatches_and_data_ranks_without_labels_add_nothing(world, tmp_path):
    """Of four micro-batches per data rank every second one has no label; of data rank 1 none has in the first step."""
    blank = [without_labels(row) for row in D8]
    rows = [*(blank[i] if i % 2 else row for i, row in enumerate(D8)), *blank]
    keys, batch = {"parallel": parallel()}, {"global_size": 8, "micro_size": 1}
    expected = world(step, 1, tmp_path / "one", rows, {"parallel": {"engine": "ddp"}}, 2, batch)[0]
    for got in world(step, 4, tmp_path / "two", rows, keys, 2, batch):
        close(got, expected)
        assert got[2].empty_steps == 1


def use(out, pp: int, sections: dict):
    """Loss of an evaluation, its predictions, and the loss of a step after it."""
    trainer = make_trainer(
        "ddp",
        out / f"pp{pp}",
        model=tiny_llama(layers=4, tied=False),
        given={"eval_dataset": D8[:5]},
        **{"evaluation": {"batch_size": 1}} | sections,
    )
    evaluation = trainer.evaluate()
    predicted = trainer.predict(D8[:5])
    trainer.train()
    return evaluation["eval_loss"], predicted.predictions, predicted.label_ids, trainer.state.loss


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (2, {"parallel": parallel()}),
        (4, {"parallel": parallel("fsdp2", schedule="interleaved_1f1b"), "loss": {"chunk_tokens": 7}}),
        pytest.param(2, {"parallel": parallel(schedule="zbv")}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel": parallel(), "loss": {"chunk_tokens": 7}}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel": parallel(tp=2, sequence_parallel=True)}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel": parallel("deepspeed"), "zero": {"stage": 1}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "fsdp2 and chunks", "zbv", "chunks", "tp and sequence", "zero1"],
)
def test_evaluations_and_predictions_are_those_of_one_process_on_every_rank(world, tmp_path, ranks, sections):
    expected = world(use, 1, tmp_path, 1, {"parallel": {"engine": "ddp"}})[0]
    for eval_loss, predictions, labels, loss in world(use, ranks, tmp_path, 2, sections):
        assert eval_loss == pytest.approx(expected[0], rel=1e-6)
        torch.testing.assert_close(torch.tensor(predictions), torch.tensor(expected[1]), rtol=1e-5, atol=1e-5)
        assert (labels == expected[2]).all()
        assert loss == pytest.approx(expected[3], rel=1e-6)


def poisoned(out, engine: str, sections: dict, on_non_finite: str):
    """A step in which the last stage's loss of one micro-batch is NaN."""
    trainer = make_trainer(
        engine,
        out,
        model=tiny_llama(tied=False),
        batch={"global_size": 8, "micro_size": 1},
        run={"on_non_finite": on_non_finite},
        **sections,
    )
    before = weights(trainer)
    head = trainer.run.model.lm_head
    if trainer.run.mesh.grid.pp_rank == 1:
        head.register_forward_hook(lambda module, args, logits: logits * (math.nan if args[0].shape[1] == 60 else 1.0))
    try:
        trainer.train()
    except NonFiniteError as error:
        return str(error), largest_difference(weights(trainer), before)
    return trainer.state.skipped_steps, largest_difference(weights(trainer), before)


@pytest.mark.parametrize("engine", tiers(["ddp", "fsdp2", "zero1"], quick=["ddp"]))
def test_a_loss_that_is_not_finite_stops_every_stage_and_leaves_all_weights(world, tmp_path, engine):
    keys = {"parallel": {"pp": 2}}
    for text, moved in world(poisoned, 4, tmp_path / "stop", engine, keys, "stop"):
        assert "the loss of step 1 is not finite (rank" in text and "samples" in text
        assert moved == 0
    for skipped, moved in world(poisoned, 4, tmp_path / "skip", engine, keys, "skip"):
        assert (skipped, moved) == (1, 0)


def refused(out, sections: dict, given=None, rows=None):
    try:
        make_trainer("ddp", out, model=tiny_llama(), rows=rows, given=given, **sections).train()
    except (ConfigError, DataError) as error:
        return str(error)
    return None


def embedded(features):
    batch = collate(features)
    return {"inputs_embeds": torch.zeros(*batch["input_ids"].shape, 32), "labels": batch["labels"]}


def test_batches_without_input_ids_are_refused_on_every_rank(world, tmp_path):
    for text in world(refused, 2, tmp_path, {"parallel": parallel()}, {"data_collator": embedded}):
        assert "no input_ids" in text and "parallel.pp" in text


def generate(out):
    trainer = make_trainer("ddp", out, parallel=parallel())
    try:
        trainer.generate(["a"])
    except ConfigError as error:
        return str(error)
    return None


def test_a_model_in_stages_does_not_generate_and_says_what_does(world, tmp_path):
    for text in world(generate, 2, tmp_path):
        assert "parallel.pp is 2" in text and "save_model()" in text


def frozen_end(out):
    """The only trained layer is the first one."""
    model = tiny_llama(layers=2)
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    return refused_model(out, model)


def own_optimizer(out):
    model = tiny_llama(layers=2)
    return refused_model(out, model, {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)})


def no_language_model(out):
    return refused_model(out, torch.nn.Linear(2, 2))


def refused_model(out, model, given=None):
    try:
        make_trainer("ddp", out, model=model, given=given, parallel=parallel())
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (frozen_end, ("pipeline rank 1 of 2 has no parameter that requires a gradient", "parallel.pp_split")),
        (own_optimizer, ("Trainer(optimizers=...) with parallel.pp = 2", "set parallel.pp to 1")),
        (no_language_model, ("Linear", "parallel.pp")),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_on_every_rank(world, tmp_path, attempt, words):
    for text in world(attempt, 2, tmp_path):
        assert text is not None and all(word in text for word in words), text
