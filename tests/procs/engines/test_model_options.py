"""Activation checkpointing and grown embeddings under the engines."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer.trainer.trainer import Trainer
from tests.helpers.checkpoints import VOCAB, make_checkpoint
from tests.helpers.runs import D8, collate, largest_difference, make_trainer, run_config, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import oracle, tiny_llama

ENGINES = ["ddp", "zero2", "zero3", "fsdp2"]


@pytest.mark.parametrize("engine", tiers(ENGINES, quick=["zero3"]))
def test_activation_checkpointing_computes_twice_and_changes_no_gradient(world, tmp_path, engine):
    model = tiny_llama()
    loss, norm, gradients = oracle(model, D8)
    expected = {name: p.detach() - gradients[name] for name, p in model.named_parameters()}
    for results in world(with_and_without, 2, engine, tmp_path):
        # Two micro-batches on each rank.
        assert [calls for _, _, _, calls in results] == [2, 4]
        for got_loss, got_norm, final, _ in results:
            assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-6)
            assert largest_difference(final, expected) <= 1e-6


def with_and_without(engine, out):
    results = []
    for section in ({}, {"gradient_checkpointing": True}):
        model, calls = tiny_llama(), []
        model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        config = run_config(engine, out, model=section)
        trainer = Trainer(model=model, config=config, train_dataset=D8, data_collator=collate)
        state = trainer.train()
        results.append((state.loss, state.grad_norm, weights(trainer), len(calls)))
        trainer.close()
    return results


@pytest.mark.parametrize("multiple", [None, 8], ids=["exact", "padded"])
@pytest.mark.parametrize("kind", ["llama_tied", "llama"])
@pytest.mark.case("H6")
@pytest.mark.parametrize("engine", tiers(["ddp", "zero3", "fsdp2"], quick=["zero3"]))
def test_grown_embeddings_keep_old_rows_and_agree_on_new_ones(world, tmp_path, engine, kind, multiple):
    folder = make_checkpoint(tmp_path / "checkpoint", kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<new {i}>" for i in range(VOCAB + 3 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    old = load_file(f"{folder}/model.safetensors")
    size = VOCAB + 3 if multiple is None else 328
    results = world(grow, 2, engine, tmp_path, multiple)
    for first, loss in results:
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & old.keys():
            value, before = first[name], old[name]
            assert value.shape == (size, 32)
            assert torch.equal(value[:VOCAB], before)
            torch.testing.assert_close(value[VOCAB:], before.mean(0).expand(size - VOCAB, -1))
            assert torch.equal(value, results[0][0][name])
        assert loss == results[0][1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == size
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == VOCAB + 3


def grow(engine, out, multiple):
    model = {"path": str(out / "checkpoint"), "tokenizer": str(out / "tokenizer"), "resize_embeddings": True}
    if multiple is not None:
        model["pad_embeddings_to_multiple_of"] = multiple
    config = run_config(engine, out, model=model, data={"cache_dir": str(out / "cache")}, checkpoint={"export": True})
    # The new ids are learned from.
    rows = [{"input_ids": [5, 6, VOCAB + i % 3, 7, 8]} for i in range(8)]
    trainer = Trainer(config=config, train_dataset=rows)
    first = weights(trainer)
    return first, trainer.train().loss


@pytest.mark.case("H4")
@pytest.mark.parametrize("engine", tiers(["ddp", "zero1", "zero2", "zero3", "fsdp2"], quick=["zero2", "fsdp2"]))
def test_frozen_parameters_stay_and_are_exported_with_the_others(world, tmp_path, engine):
    model = frozen_llama()
    loss, norm, gradients = oracle(model, D8)
    expected = {name: p.detach() - gradients.get(name, 0.0) for name, p in model.named_parameters()}
    for got_loss, got_norm, final in world(train_frozen, 2, engine, tmp_path):
        assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-6)
        assert largest_difference(final, expected) <= 1e-6
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == expected.keys()


def frozen_llama():
    model = tiny_llama(tied=False)
    model.model.embed_tokens.requires_grad_(False)
    return model


def train_frozen(engine, out):
    trainer = make_trainer(engine, out, model=frozen_llama(), checkpoint={"export": True})
    state = trainer.train()
    owned = {piece.name for piece in trainer.engine.parameter_layout()}
    assert owned == trainer.engine.state().keys() and "model.embed_tokens.weight" not in owned
    return state.loss, state.grad_norm, weights(trainer)
