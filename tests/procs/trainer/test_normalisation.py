"""One loss everywhere: the sum over the label tokens of the whole step, divided once by their number."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ds_trainer.errors import DataError
from tests.helpers.runs import D8, EACH_ENGINE, collate, largest_difference, make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import oracle, tiny_llama

LOSS, GRAD_NORM = 4.191505, 0.783778
"""Of one process and one batch; they depend on seeds and torch's generator alone."""


def one_step(engine, out, model=None, rows=None, given=None, **sections):
    trainer = make_trainer(engine, out, model=model, rows=rows, given=given, **sections)
    state = trainer.train()
    result = state.loss, state.grad_norm, weights(trainer)
    trainer.close()
    return result


def after_sgd(model, gradients):
    """The weights after one step of SGD with learning rate 1."""
    return {name: p.detach() - gradients[name] for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def expected():
    model = tiny_llama()
    loss, norm, gradients = oracle(model, D8)
    assert loss == pytest.approx(LOSS, abs=5e-7) and norm == pytest.approx(GRAD_NORM, abs=5e-7)
    return loss, norm, after_sgd(model, gradients)


def check(results, expected):
    loss, norm, final = expected
    for got_loss, got_norm, got_weights in results:
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert got_norm == pytest.approx(norm, rel=1e-6)
        assert largest_difference(got_weights, final) <= 1e-6


@pytest.mark.case("B1", "B8", "G6")
@pytest.mark.parametrize(("ranks", "micro_sizes"), [(1, (8, 2)), (2, (2, 1))], ids=["1-rank", "2-ranks"])
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_loss_norm_and_weights_do_not_depend_on_how_the_batch_is_cut(
    world, tmp_path, expected, engine, ranks, micro_sizes
):
    for results in world(cut_in_turn, ranks, engine, tmp_path, micro_sizes):
        check(results, expected)


def cut_in_turn(engine, out, micro_sizes):
    return [one_step(engine, out, batch={"global_size": 8, "micro_size": size}) for size in micro_sizes]


class MyModel(LlamaForCausalLM):
    pass


ALL_LABELS = [{"input_ids": row["input_ids"]} for row in D8]


@pytest.mark.case("K3")
def test_a_class_derived_from_a_causal_language_model_has_its_loss_whatever_it_is_called(world, tmp_path):
    model = tiny_llama()
    expected = oracle(model, [row | {"labels": row["input_ids"]} for row in ALL_LABELS])
    for results in world(derived, 2, tmp_path):
        check(results, (*expected[:2], after_sgd(model, expected[2])))


def derived(out):
    model = tiny_llama()
    model.__class__ = MyModel
    cells = [("ddp", 1), ("zero2", 2), ("fsdp2", 4)]
    return [
        one_step(engine, out, copy.deepcopy(model), ALL_LABELS, batch={"micro_size": size}) for engine, size in cells
    ]


@pytest.mark.case("K8")
def test_labels_beyond_the_vocabulary_are_named_in_training_and_evaluation_whatever_the_layout(world, tmp_path):
    for texts in world(labelled_beyond, 2, tmp_path):
        assert len(texts) == 8
        for name, text in texts:
            assert "sample 5 has the label 65, and the model's head has 65 rows" in text, name
            assert text.startswith("on rank 1") == (name != "tp"), name


LAYOUTS = {
    "tp": {"parallel": {"engine": "ddp", "tp": 2}},
    "pp": {"parallel": {"engine": "ddp", "pp": 2}},
    "chunked": {"parallel": {"engine": "ddp"}, "loss": {"chunk_tokens": 8}},
    "zero2": {"zero": {"stage": 2}},
}


def labelled_beyond(out):
    texts = []
    for name, sections in LAYOUTS.items():
        trainer = make_trainer(
            "ddp" if "parallel" in sections else "zero2",
            out,
            batch={"micro_size": 1},
            evaluation={"batch_size": 1},
            given={"data_collator": beyond, "eval_dataset": D8},
            **sections,
        )
        for act in (trainer.evaluate, trainer.train):
            with pytest.raises(DataError) as caught:
                act()
            texts.append((name, str(caught.value)))
        trainer.close()
    return texts


def beyond(features):
    batch = collate(features)
    batch["labels"][(batch["input_ids"][:, 0] == D8[5]["input_ids"][0]), -1] = 65
    return batch


@pytest.mark.case("B2")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_rank_of_short_samples_beside_one_of_long_ones(world, tmp_path, expected, engine):
    check(world(short_and_long, 2, engine, tmp_path), expected)


def short_and_long(engine, out):
    rows = [D8[i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]  # Rank 0 takes places 0, 1, 4 and 5.
    trainer = make_trainer(engine, out, rows=rows)
    lengths = [len(rows[i]["input_ids"]) for part in trainer.run.train_loader.sampler.microbatches(0) for i in part]
    assert max(lengths) <= 7 if trainer.is_world_process_zero else min(lengths) >= 40
    state = trainer.train()
    return state.loss, state.grad_norm, weights(trainer)


@pytest.mark.case("B2")
@pytest.mark.parametrize("engine", tiers(["ddp", "zero2", "zero3"], quick=["zero3"]))
def test_label_smoothing_equals_torch_on_the_whole_batch(world, tmp_path, engine):
    model, batch = tiny_llama(), collate(D8)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    expected = from_backward(model, loss)
    assert expected[0] != pytest.approx(LOSS, rel=1e-4)
    check(world(smoothed, 2, engine, tmp_path), expected)


def smoothed(engine, out):
    return one_step(engine, out, loss={"label_smoothing": 0.1})


def from_backward(model, loss):
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values()))
    return loss.item(), norm.item(), after_sgd(model, gradients)


@pytest.mark.case("B2")
@pytest.mark.parametrize("engine", tiers(["ddp", "zero2", "zero3"], quick=["zero3"]))
def test_a_loss_function_of_the_user_is_divided_by_the_tokens_of_all_ranks(world, tmp_path, expected, engine):
    check(world(users_loss, 2, engine, tmp_path), expected)


def users_loss(engine, out):
    return one_step(engine, out, given={"compute_loss_func": summed_and_divided})


def summed_and_divided(outputs, labels, num_items_in_batch):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def tiny_bert(num_labels=3):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=65,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=num_labels,
    )
    model = BertForSequenceClassification(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # At zero, the key's would have only rounding to be compared: its gradient is zero.
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def tiny_t5():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=65,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ).train()


def classes(features):
    return _without_labels(features) | {"labels": torch.tensor([sum(f["input_ids"]) % 3 for f in features])}


def values(features):
    return _without_labels(features) | {"labels": torch.tensor([sum(f["input_ids"]) / 500 for f in features])}


def _without_labels(features):
    batch = collate(features)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


OWN_LOSS = {
    "classes": (tiny_bert, classes, D8[:5]),
    "tokens": (tiny_t5, collate, D8),
    "t5-short": (tiny_t5, collate, D8[:5]),
}
"""Model that computes its own mean, its collator, samples; 5 samples leave rank 1 without any in the second pass."""


@pytest.mark.case("B2")
@pytest.mark.parametrize("engine", tiers(["ddp", "zero2", "zero3"], quick=["zero3"]))
@pytest.mark.parametrize("kind", OWN_LOSS)
def test_a_mean_that_the_model_itself_computes_is_weighted_by_its_labels(world, tmp_path, kind, engine):
    make_model, make_batch, rows = OWN_LOSS[kind]
    model = make_model()
    check(world(models_own, 2, engine, tmp_path, kind), from_backward(model, model(**make_batch(rows)).loss))


def models_own(engine, out, kind):
    make_model, make_batch, rows = OWN_LOSS[kind]
    return one_step(engine, out, model=make_model(), rows=rows, given={"data_collator": make_batch})


@pytest.mark.case("B2")
def test_a_regression_counts_samples_and_not_the_filler_of_a_rank_without_any(world, tmp_path):
    model = tiny_bert(num_labels=1)
    check(world(regression, 2, "ddp", tmp_path), from_backward(model, model(**values(D8[:5])).loss))


def regression(engine, out):
    return one_step(engine, out, model=tiny_bert(num_labels=1), rows=D8[:5], given={"data_collator": values})


@pytest.mark.case("G6")
@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_clipping_scales_the_update_to_the_limit(world, tmp_path, expected, engine):
    initial = {name: p.detach() for name, p in tiny_llama().named_parameters()}
    for loss, norm, final in world(clipped, 2, engine, tmp_path):
        assert (loss, norm) == pytest.approx(expected[:2], rel=1e-6), "the norm is that before clipping"
        update = sum(((final[name] - initial[name]).double() ** 2).sum() for name in initial) ** 0.5
        assert update.item() == pytest.approx(0.1, abs=1e-5)


def clipped(engine, out):
    return one_step(engine, out, optimizer={"max_grad_norm": 0.1})
