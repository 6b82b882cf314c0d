"""Text from a model in training: what one process makes of the same weights, and training none the wiser."""

from __future__ import annotations

import json
import os
import signal
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from transformers import GenerationConfig, LlamaForSequenceClassification

from ds_trainer.callbacks.base import Callback
from ds_trainer.data.prompts import encode_prompt
from ds_trainer.engines.introspect import storage_bytes
from ds_trainer.errors import ConfigError, DataError
from ds_trainer.launch.signals import EXIT_CODE
from ds_trainer.trainer.generation import Decoding, generate
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.runs import D8, collate, make_trainer, run_config, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import tiny_llama
from tests.helpers.tokenizers import make_tokenizer

NEW = 16
PROMPTS = 5
"""One at a time on two ranks: three rounds, in the last of which the second rank has a filler."""
STEPS = 3
CUT = ("zero3", "fsdp2")
"""Engines that gather parameters in every forward pass."""
EVALUATION = {"generate_samples": PROMPTS, "max_new_tokens": NEW, "batch_size": 1, "every_steps": 1, "at_start": True}
ENDS = [2, 26]
"""The tokenizer's end of text, and one of the checkpoint's own, which the first prompt's second new token is."""


def model(**extra):
    """Continues its prompts with ever other tokens."""
    llama = tiny_llama(vocab=300, tied=False, initializer_range=0.5, **extra)
    llama.generation_config.eos_token_id = 26
    return llama


def alone(prompt: list[int], new: int = NEW, llama=None) -> list[int]:
    """What transformers makes of one prompt in one process, greedily and without padding."""
    settings = GenerationConfig(max_new_tokens=new, eos_token_id=ENDS)
    out = (llama or model()).eval().generate(torch.tensor([prompt]), generation_config=settings)
    ids = out[0, len(prompt) :].tolist()
    return ids[:-1] if ids[-1] in ENDS else ids


def with_tokenizer() -> dict:
    return {"processing_class": make_tokenizer()}


class Watch(Callback):
    """The losses and weights of every step; draws texts between steps where it is told to."""

    def __init__(self, draws: bool) -> None:
        self.losses, self.weights, self._draws = [], {}, draws

    def on_train_begin(self, trainer):
        self.weights[0] = weights(trainer)

    def on_step_end(self, trainer):
        self.losses.append(trainer.state.loss)
        self.weights[trainer.state.global_step] = weights(trainer)
        if self._draws:
            trainer.generate(["<s>a", "<s>b"], max_new_tokens=3, do_sample=True, temperature=2.0)


@pytest.mark.slow
@pytest.mark.case("F4")
@pytest.mark.parametrize("engine", ["ddp", "zero2", *CUT])
def test_texts_are_those_of_one_process_and_the_training_goes_on_as_if_there_had_been_none(world, tmp_path, engine):
    results = world(train_with_and_without, 2, engine, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "with" / "generations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["index"]) for line in lines] == [
        (s, i) for s in range(STEPS + 1) for i in range(PROMPTS)
    ]
    (with_texts, without), (other, _) = results
    decode, oracle, lengths = make_tokenizer().decode, model(), set()
    for line in lines:
        oracle.load_state_dict(with_texts.weights[line["step"]])
        ids, half = D8[line["index"]]["input_ids"], len(D8[line["index"]]["input_ids"]) // 2
        expected = alone(ids[:half], llama=oracle)
        lengths.add(len(expected))
        assert line["generated"] == decode(expected, skip_special_tokens=True)
        assert line["prompt"] == decode(ids[:half])
        assert line["reference"] == decode(ids[half:], skip_special_tokens=True)
    assert min(lengths) == 1 and max(lengths) == NEW
    assert with_texts.losses == without.losses == other.losses
    assert all(torch.equal(with_texts.weights[STEPS][n], w) for n, w in without.weights[STEPS].items())


def train_with_and_without(engine, out):
    watches = []
    for name, evaluation in (("with", EVALUATION), ("without", {"at_end": False})):
        watch = Watch(draws=name == "with")
        trainer = make_trainer(
            engine,
            out / name,
            model=model(attention_dropout=0.2),
            given={"eval_dataset": D8, "processing_class": make_tokenizer(), "callbacks": [watch]},
            evaluation=evaluation,
            optimizer={"name": "adamw", "lr": 1e-3},
            run={"max_steps": STEPS},
        )
        trainer.train()
        trainer.close()
        watches.append(watch)
    return watches


@pytest.mark.parametrize("engine", CUT)
def test_ranks_run_equally_many_forward_passes_and_give_gathered_parameters_back(world, tmp_path, engine):
    results = world(count_forward_passes, 2, engine, tmp_path)
    for texts, passes, held_before, held_after in results:
        assert [len(ids) for ids in texts] == [1, NEW]  # One on each rank.
        assert passes == [2] + [1] * (NEW - 1)  # The prompt, then one token at a time.
        assert held_after == held_before


def count_forward_passes(engine, out):
    trainer = make_trainer(
        engine,
        out,
        model=model(),
        given=with_tokenizer(),
        evaluation={"batch_size": 1},
        optimizer={"name": "sgd", "lr": 1e-6},
    )
    trainer.train_step()
    passes = []
    trainer.run.model.register_forward_pre_hook(
        lambda _, args, inputs: passes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    held = storage_bytes(trainer.run.model.parameters())
    prompts = [row["input_ids"][:2] for row in D8[:2]]
    texts = generate(trainer.run, prompts, Decoding(NEW), "a test")
    assert all(module.training for module in trainer.run.model.modules())
    return texts, passes, held, storage_bytes(trainer.run.model.parameters())


PROMPTS_OF_A_USER = ["the cat", "what is the capital of France? yes", "hello world foo()"]
CHAT = [{"role": "user", "content": "what is the capital of France?"}]


def test_texts_and_conversations_are_continued_together_as_each_is_alone_whatever_the_number_of_ranks(world, tmp_path):
    one, *two = [*world(ask, 1, tmp_path / "1"), *world(ask, 2, tmp_path / "2")]
    assert one == two[0] == two[1]
    tokenizer = make_tokenizer()
    prompts = [encode_prompt(prompt, tokenizer, "here") for prompt in (*PROMPTS_OF_A_USER, CHAT)]
    assert (
        tokenizer.decode(prompts[3]) == "<s><|start|>user\nwhat is the capital of France?<|end|>\n<|start|>assistant\n"
    )
    assert one["greedy"] == [tokenizer.decode(alone(ids), skip_special_tokens=True) for ids in prompts]
    assert one["longer"] == tokenizer.decode(alone(prompts[0], new=64), skip_special_tokens=True)
    assert one["drawn"] != one["greedy"] and one["drawn"] != one["drawn from another seed"]


def ask(out):
    trainer = make_trainer("ddp", out, model=model(), given=with_tokenizer(), evaluation={"batch_size": 2})
    prompts = [*PROMPTS_OF_A_USER, CHAT]
    return {
        "greedy": trainer.generate(prompts, max_new_tokens=NEW),
        "longer": trainer.generate(prompts[:1])[0],
        "drawn": trainer.generate(prompts, do_sample=True, top_k=0),
        "drawn from another seed": trainer.generate(prompts, do_sample=True, top_k=0, seed=9),
    }


@pytest.mark.parametrize("engine", tiers(["ddp", "zero0", *CUT], quick=CUT))
def test_it_runs_in_the_number_format_of_the_run_and_with_the_cache_that_checkpointing_turns_off(
    world, tmp_path, engine
):
    ((dtypes, lengths),) = world(generate_in_bf16, 1, engine, tmp_path)
    assert dtypes == {torch.bfloat16}
    assert lengths == [2] + [1] * (NEW - 1)


def generate_in_bf16(engine, out):
    sections = {"precision": {"dtype": "bf16"}, "model": {"gradient_checkpointing": True}}
    trainer = Trainer(
        model=model(),
        config=run_config(engine, out, **sections),
        train_dataset=D8,
        data_collator=collate,
        **with_tokenizer(),
    )
    dtypes, lengths = set(), []

    def look(module, args, inputs, outputs):
        dtypes.add(outputs.logits.dtype)
        lengths.append(inputs["input_ids"].shape[1])

    trainer.run.model.register_forward_hook(look, with_kwargs=True)
    generate(trainer.run, [D8[1]["input_ids"][:2]], Decoding(NEW), "a test")
    return dtypes, lengths


ALL_LEARNED = [{"input_ids": row["input_ids"]} for row in D8]


def without_labels_of_tokens(features):
    batch = {"input_ids": torch.tensor([[3, 4]] * len(features))}
    return batch | {"labels": torch.zeros(len(features), dtype=torch.long)}


def test_what_cannot_be_continued_is_refused_before_the_first_step(world, tmp_path):
    texts = world(refusals, 1, tmp_path)[0]
    for case, found, change in (
        ("no data", "evaluation.generate_samples is 2, and there is no evaluation data", "data.eval"),
        ("no tokenizer", "evaluation.generate_samples is 2, and there is no tokenizer", "model.tokenizer"),
        ("no prompt", "evaluation sample 0 has no prompt", "data.eval"),
        ("no tokens", "evaluation sample 0 has {'input_ids': [1, 2], 'labels': [1]}", "data_collator"),
        ("no generate", "LlamaForSequenceClassification has no generate()", "evaluation.generate_samples to 0"),
        (
            "too long",
            "prompt 0 has 2 tokens and may be continued by 127, the model has 128",
            "evaluation.max_new_tokens",
        ),
        ("empty", "prompt 1 holds no token", "some text"),
        ("a number", "prompt 0 is an int", "reshape"),
        ("no template", "prompt 0 is a conversation, and the tokenizer has no chat template", "data.chat_template"),
    ):
        assert found in texts[case] and change in texts[case].partition("change:")[2], texts[case]


def refusals(out):
    tokenizer = make_tokenizer(bos=False, chat_template=None)
    classifier = LlamaForSequenceClassification(model().config)
    samples = {"eval_dataset": D8, "processing_class": tokenizer}

    def refused(call, kind):
        with pytest.raises(kind) as caught:
            call()
        return str(caught.value)

    def built(given, kind=ConfigError, llama=None, **evaluation):
        section = {"generate_samples": 2} | evaluation
        return refused(lambda: make_trainer("ddp", out, model=llama or model(), given=given, evaluation=section), kind)

    trainer = make_trainer("ddp", out, model=model(), given={"processing_class": tokenizer})
    return {
        "no data": built({"processing_class": tokenizer}),
        "no tokenizer": built({"eval_dataset": D8}),
        "no prompt": built(samples | {"eval_dataset": ALL_LEARNED}, DataError),
        "no tokens": built(samples | {"data_collator": without_labels_of_tokens}, DataError),
        "no generate": built(samples, llama=classifier),
        "too long": built(samples, DataError, max_new_tokens=127),
        "empty": refused(lambda: trainer.generate(["a", ""]), DataError),
        "a number": refused(lambda: trainer.generate([7]), DataError),
        "no template": refused(lambda: trainer.generate([CHAT]), DataError),
    }


def test_ranks_that_ask_for_different_texts_are_told(world, tmp_path):
    for text in world(ask_differently, 2, tmp_path):
        assert "other prompts or options on ranks [1] than on rank 0" in text


def ask_differently(out):
    trainer = make_trainer("ddp", out, model=model(), given=with_tokenizer())
    with pytest.raises(DataError) as caught:
        trainer.generate([f"prompt of rank {trainer.run.mesh.grid.rank}"])
    return str(caught.value)


def test_an_evaluation_that_a_signal_cuts_short_between_two_texts_is_made_anew(world, tmp_path):
    assert world(stop_and_go_on, 2, tmp_path, True) == [(EXIT_CODE, [])] * 2
    assert not (tmp_path / "generations.jsonl").exists()
    assert world(stop_and_go_on, 2, tmp_path, False) == [(0, [1])] * 2
    lines = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(PROMPTS))


def stop_and_go_on(out, stops):
    llama = model()
    if stops:  # At the first prompt of rank 1; the next round hears it.
        plain, rank = llama.generate, int(os.environ["RANK"])
        llama.generate = lambda *args, **kwargs: (
            os.kill(os.getpid(), signal.SIGTERM) if rank == 1 else None,
            plain(*args, **kwargs),
        )[1]
    trainer = make_trainer(
        "ddp",
        out,
        model=llama,
        given=with_tokenizer() | {"eval_dataset": D8},
        evaluation=EVALUATION | {"at_start": False, "every_steps": None},
        checkpoint={"resume": "auto"},
    )
    code = 0
    try:
        trainer.train()
    except SystemExit as stop:
        code = stop.code
    return code, [line.step for line in trainer.state.log_history if hasattr(line, "eval_loss")]


def test_an_evaluation_outside_of_a_training_shows_texts_and_leaves_an_earlier_runs_alone(world, tmp_path):
    (tmp_path / "generations.jsonl").write_text('{"step": 10}\n')
    (shown,) = world(only_evaluate, 1, tmp_path)
    assert "step 0, evaluation sample 0, generated between" in shown
    assert (tmp_path / "generations.jsonl").read_text() == '{"step": 10}\n'


def only_evaluate(out):
    given = with_tokenizer() | {"eval_dataset": D8, "train_dataset": None}
    with redirect_stderr(StringIO()) as shown:
        make_trainer("ddp", out, model=model(), given=given, evaluation={"generate_samples": 1}).evaluate()
    return shown.getvalue()
