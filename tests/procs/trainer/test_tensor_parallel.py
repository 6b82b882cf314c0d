"""What surrounds a step under tensor parallelism: evaluation, predictions, texts and label smoothing."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiny import tiny_llama
from tests.helpers.tokenizers import make_tokenizer


def parallel(engine: str = "ddp", **keys) -> dict:
    return {"engine": engine, "tp": 2, **keys}


def model():
    """Untied, with an odd vocabulary, of the size of the tokenizer's."""
    return tiny_llama(vocab=301, tied=False, initializer_range=0.5)


def use(out, tp: int, sections: dict):
    """Loss of an evaluation, its predictions, continued texts, and the weights after one step."""
    trainer = make_trainer(
        "ddp",
        out / f"tp{tp}",
        model=model(),
        given={"processing_class": make_tokenizer(), "eval_dataset": D8[:5]},
        **{"parallel": parallel(tp=tp), "evaluation": {"batch_size": 2}} | sections,
    )
    evaluation = trainer.evaluate()
    predicted = trainer.predict(D8[:5])
    texts = trainer.generate(["<s>a", "<s>bc", "<s>"], max_new_tokens=8)
    drawn = trainer.generate(["<s>a", "<s>b"], max_new_tokens=8, do_sample=True, temperature=1.5)
    trainer.train()
    return evaluation["eval_loss"], predicted.predictions, (texts, drawn), trainer.state.loss, weights(trainer)


def close(got, expected):
    eval_loss, predictions, texts, loss, values = got
    assert eval_loss == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(torch.tensor(predictions), torch.tensor(expected[1]), rtol=1e-5, atol=1e-4)
    assert predictions.shape[-1] == 301
    assert texts == expected[2]
    assert loss == pytest.approx(expected[3], rel=1e-6)
    assert largest_difference(values, expected[4]) < 1e-5


@pytest.fixture(scope="module")
def expected(world, tmp_path_factory):
    return world(use, 1, tmp_path_factory.mktemp("one"), 1, {"parallel": {"engine": "ddp"}})[0]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"loss": {"chunk_tokens": 7}, "parallel": parallel(sequence_parallel=True)},
        pytest.param({"loss": {"chunk_tokens": 7}}, marks=pytest.mark.slow),
        pytest.param({"parallel": parallel(sequence_parallel=True)}, marks=pytest.mark.slow),
        pytest.param({"parallel": parallel("fsdp2")}, marks=pytest.mark.slow),
        pytest.param({"parallel": parallel("deepspeed"), "zero": {"stage": 3}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "chunks and sequence", "chunks", "sequence", "fsdp2", "zero3"],
)
def test_losses_predictions_and_texts_are_those_of_one_process(world, tmp_path, expected, sections):
    for got in world(use, 2, tmp_path, 2, sections):
        close(got, expected)


def gpt2():
    """Counts positions from the first token on, and so must be told of padding; has dropout, at rest here."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def continue_padded(out, parallel: dict):
    """Texts of a batch in which one prompt is padded, and what `generate` may hand to the model."""
    trainer = make_trainer(
        "ddp",
        out,
        model=gpt2(),
        given={"processing_class": make_tokenizer()},
        parallel=parallel,
        evaluation={"batch_size": 2},
    )
    texts = trainer.generate(["<s>a", "<s>abcdefgh"], max_new_tokens=8)
    return texts, sorted(signature(trainer.run.model.forward).parameters)


@pytest.mark.case("F4")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_padded_prompt_is_continued_as_by_one_process(world, tmp_path, sequence_parallel):
    ((expected, _),) = world(continue_padded, 1, tmp_path / "one", {})
    keys = parallel(sequence_parallel=sequence_parallel)
    for texts, arguments in world(continue_padded, 2, tmp_path / "two", keys):
        assert texts == expected
        assert {"position_ids", "logits_to_keep"} <= set(arguments)


def smoothed(out, tp: int):
    trainer = make_trainer("ddp", out / f"tp{tp}", parallel=parallel(tp=tp), loss={"label_smoothing": 0.1})
    trainer.train()
    return trainer.state.loss, weights(trainer)


def test_label_smoothing_is_over_the_whole_vocabulary(world, tmp_path):
    (loss, values), *_ = world(smoothed, 1, tmp_path, 1)
    for got_loss, got in world(smoothed, 2, tmp_path, 2):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert largest_difference(got, values) < 1e-5
