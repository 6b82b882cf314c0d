"""Which modules FSDP2 gathers by themselves: blocks, large modules, and never two groups with one parameter."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from ds_trainer.config.engine_sections import FSDPConfig
from ds_trainer.engines.fsdp2.wrap import groups
from ds_trainer.errors import ConfigError
from tests.helpers.tiny import tiny_llama

BY_SIZE = {"auto_wrap_policy": "size_based_wrap"}


def names(model, **config):
    chosen = groups(model, FSDPConfig(**config))
    return [name for name, module in model.named_modules() if module in chosen]


BLOCKS = ["model.layers.0", "model.layers.1"]


def test_a_tied_embedding_is_gathered_with_the_model_and_an_untied_one_and_its_head_by_themselves():
    assert names(tiny_llama(tied=True)) == BLOCKS
    assert names(tiny_llama(tied=False)) == ["model.embed_tokens", *BLOCKS, "lm_head"]


def test_without_a_policy_blocks_are_those_that_transformers_names():
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=65))
        t5 = T5ForConditionalGeneration(
            T5Config(num_layers=1, d_model=8, d_kv=4, num_heads=2, d_ff=16, vocab_size=65, tie_word_embeddings=True)
        )
    assert names(gpt2) == ["transformer.h.0", "transformer.h.1"]
    assert names(t5) == ["encoder.block.0", "decoder.block.0"], "the shared embedding belongs to neither stack"


def test_named_classes_are_gathered_and_one_that_is_not_there_is_refused_with_those_that_are():
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_layer_cls_to_wrap": ("LlamaMLP",)}
    assert names(tiny_llama(), **policy) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    policy["transformer_layer_cls_to_wrap"] = ("LlamaMLP", "LlamaLayer")
    with pytest.raises(ConfigError, match=r"no module of class LlamaLayer\n.*LlamaDecoderLayer.*\n.*_cls_to_wrap"):
        names(tiny_llama(), **policy)
    with pytest.raises(ConfigError, match=r"Sequential .*it names none itself"):
        names(nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy="transformer_based_wrap")


def test_no_wrap_gathers_the_whole_model_at_once():
    assert names(tiny_llama(), auto_wrap_policy="no_wrap") == []


def test_by_size_the_innermost_modules_that_are_large_enough_are_gathered():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(4, 4), nn.Linear(20, 20)), nn.Linear(2, 2))
    assert names(model, **BY_SIZE, min_num_params=110) == ["0", "1.1"]
    assert names(model, **BY_SIZE, min_num_params=111) == ["1.1"]
    assert names(model, **BY_SIZE, min_num_params=20) == ["0", "1.0", "1.1"], "nothing is left for module 1"


def test_by_size_a_small_model_without_blocks_is_cut_too():
    assert len(names(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))))) == 8
    assert names(tiny_llama(), **BY_SIZE)


class Sharing(nn.Module):
    """Two children hold one matrix; a third is used without being called."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        self.b[0].weight = self.a[1].weight
        self.attention = nn.MultiheadAttention(8, 2)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        return self.b(self.a(self.layers[0](x)))


def test_modules_that_share_a_parameter_are_left_to_the_one_that_holds_both():
    assert names(Sharing(), **BY_SIZE, min_num_params=10) == ["a.0", "b.1", "attention", "layers.0"]
    outer = nn.Sequential(Sharing(), nn.Linear(8, 8))
    assert "0" in names(outer, **BY_SIZE, min_num_params=10)


def test_a_module_that_occurs_twice_is_gathered_by_the_one_that_holds_both_places():
    inner = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), inner), nn.Sequential(inner, nn.Linear(8, 8)))
    assert names(model, **BY_SIZE, min_num_params=10) == ["0.0", "1.1"]
