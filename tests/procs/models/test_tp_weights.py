"""Weights under tensor parallelism: each rank reads its part, and what is written is what one process would write."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.layout import TensorSharding, TensorSlice
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.pretrained import build_skeleton
from ds_trainer.models.resize import resize_embeddings_to_fit
from ds_trainer.models.weight_source import ModuleWeights
from ds_trainer.parallel.model_split import LocalWeights, ModelSplit
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.checkpoints import make_checkpoint, make_model
from tests.helpers.runs import D8, ENGINES, collate, run_config
from tests.helpers.shardings import SHARDINGS
from tests.helpers.tiers import tiers
from tests.helpers.tokenizers import make_tokenizer

NINE_HEADS = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
CHECKPOINTS = {
    **{f"{kv} KV heads": ("llama", {"num_key_value_heads": kv}) for kv in (1, 2, 4)},
    "tied, odd vocabulary": ("llama_tied", {"vocab_size": 321}),
    "untied, odd vocabulary": ("llama", {"vocab_size": 323}),
    **{kind: (kind, {}) for kind in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "phi3", "gemma2")},
}
QUICK = [("1 KV heads", 2), ("tied, odd vocabulary", 2), ("mixtral", 2), ("deepseek_v3", 2)]
SLOW = [("2 KV heads", 4), ("untied, odd vocabulary", 4), ("gpt2", 2), ("qwen3_moe", 4), ("phi3", 2), ("gemma2", 2)]


def there_and_back(out, source, tp, engine="ddp", growth=None):
    """Loads a checkpoint and exports it as it is; elements of this rank's parameters, and of the whole model's."""
    sections = {"parallel": {"tp": tp}, "batch": {"global_size": None, "micro_size": 2}, "model": growth or {}}
    given = {"train_dataset": D8, "data_collator": collate}
    trainer = Trainer(model=source, config=run_config(engine, out, **sections), **given)
    held = sum(p.numel() for p in trainer.engine.module.parameters())
    trainer.save_model(out / "model")
    trainer.close()
    return held, trainer.run.num_trained


def values(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")}


@pytest.mark.case("D3", "D13", "I1", "I2")
@pytest.mark.parametrize(("name", "tp"), tiers(product(CHECKPOINTS, [2, 4]), quick=QUICK, slow=SLOW))
def test_a_checkpoint_comes_back_byte_for_byte(world, tmp_path, name, tp):
    kind, changes = CHECKPOINTS[name]
    source = make_checkpoint(tmp_path / "source", kind, **changes)
    for held, whole in world(there_and_back, tp, tmp_path, source, tp):
        assert held < 0.65 * whole, "no rank holds more than its part"
    assert values(tmp_path / "model") == values(source)


@pytest.mark.parametrize("kind", tiers(["llama", "llama_tied"], slow=["llama_tied"]))
def test_heads_that_three_ranks_divide_come_back_byte_for_byte(world, tmp_path, kind):
    source = make_checkpoint(tmp_path / "source", kind, dtype=torch.bfloat16, **NINE_HEADS)
    world(there_and_back, 3, tmp_path, source, 3)
    assert values(tmp_path / "model") == values(source)


@pytest.mark.parametrize(
    ("kind", "engine"),
    tiers(
        product(["llama_tied", "mixtral"], ENGINES),
        slow=[("llama_tied", "zero3"), ("llama_tied", "fsdp2"), ("mixtral", "zero2")],
    ),
)
def test_a_checkpoint_that_data_ranks_cut_too_comes_back_byte_for_byte(world, tmp_path, engine, kind):
    changes = {"vocab_size": 321, "num_key_value_heads": 1}
    source = make_checkpoint(tmp_path / "source", kind, dtype=torch.bfloat16, **changes)
    world(there_and_back, 4, tmp_path, source, 2, engine)
    assert values(tmp_path / "model") == values(source)


@pytest.mark.case("H6")
@pytest.mark.parametrize(
    ("kind", "engine"),
    tiers(
        product(["llama", "llama_tied"], ["ddp", "zero3", "fsdp2"]),
        slow=[("llama", "zero3"), ("llama_tied", "fsdp2")],
    ),
)
def test_embeddings_grow_by_the_rows_of_one_process(world, tmp_path, engine, kind):
    source = make_checkpoint(tmp_path / "source", kind, vocab_size=270)
    rows = len(make_tokenizer())
    assert rows > 270
    rows += rows % 2 == 0  # Odd, so that two tensor-parallel ranks pad it.
    growth = {"resize_embeddings": True, "pad_embeddings_to_multiple_of": rows}
    world(there_and_back, 1, tmp_path / "one", source, 1, engine, growth)
    for held, whole in world(there_and_back, 4, tmp_path / "four", source, 2, engine, growth):
        assert held < 0.65 * whole
    one, four = tmp_path / "one" / "model", tmp_path / "four" / "model"
    assert values(four) == values(one)
    assert json.loads((four / "config.json").read_text())["vocab_size"] == rows
    old = load_file(Path(source) / "model.safetensors")["model.embed_tokens.weight"]
    new = load_file(four / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(new[:270], old)
    assert torch.equal(new[270:], old.mean(0).expand(rows - 270, -1))


def test_boxes_of_grown_embeddings_are_cuts_of_the_whole_tensor(tmp_path):
    folder = make_checkpoint(tmp_path, "phi", vocab_size=270)
    model, config = build_skeleton(folder, ModelConfig(), torch.float32), ModelConfig(resize_embeddings=True)
    weights = resize_embeddings_to_fit(model, make_tokenizer(), CheckpointWeights(folder, model), config)
    for name in ("model.embed_tokens.weight", "lm_head.bias"):
        whole = weights.view(name)
        for first, last in ((0, 100), (100, 270), (260, 280), (270, 290), (285, len(whole))):
            wanted = TensorSlice.whole(tuple(whole.shape)).along(0, first, last - first)
            wanted = wanted.along(len(wanted.sizes) - 1, wanted.offsets[-1] + 1, wanted.sizes[-1] - 1)
            assert torch.equal(weights.read_slice(name, wanted), whole[wanted.index])


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_local_weights_are_the_ranges_of_their_rank_and_zeros(sharding):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(sharding.shape))
    numel = prod(sharding.local_shape)
    for rank, ranges in enumerate(sharding.ranges):
        weights = LocalWeights(ModuleWeights(model), ModelSplit({"weight": sharding}, rank))
        expected = torch.zeros(sharding.local_shape)
        held = torch.cat(
            [model.weight.narrow(sharding.dim, start, stop - start) for start, stop in ranges], sharding.dim
        )
        expected.narrow(sharding.dim, 0, held.shape[sharding.dim]).copy_(held.detach())
        assert torch.equal(weights.view("weight"), expected)
        for start, stop in ((0, numel), (1, numel - 1), (numel // 2, numel), (2, 2)):
            assert torch.equal(weights.view("weight", (start, stop)), expected.flatten()[start:stop])


def test_a_column_layer_s_local_weight_is_the_source_s_own_memory():
    model = make_model("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    sharding = TensorSharding.even(tuple(model.get_parameter(name).shape), 0, 2)
    local = LocalWeights(ModuleWeights(model), ModelSplit({name: sharding}, 1)).view(name)
    assert local.untyped_storage().data_ptr() == model.get_parameter(name).untyped_storage().data_ptr()
