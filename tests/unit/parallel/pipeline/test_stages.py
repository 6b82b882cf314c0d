"""A model that is cut into stages computes what the whole one does, in one process, hidden states handed on by hand."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from itertools import cycle, product

import pytest
import torch
from torch import nn
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ds_trainer.errors import ModelError
from ds_trainer.loss import CrossEntropy, shifted_labels
from ds_trainer.models.chunked_cross_entropy import chunk_cross_entropy
from ds_trainer.parallel.pipeline.split import split_into_stages
from ds_trainer.parallel.pipeline.stage_forward import StageLayers
from tests.helpers.tiny import tiny_llama

VOCAB, LAYERS = 65, 4
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "full_attention"] * 2


def make(name):
    torch.manual_seed(0)
    match name:
        case "tied llama":
            return tiny_llama(layers=LAYERS)
        case "sliding qwen2":
            return Qwen2ForCausalLM(
                Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=2)
            )
        case "gemma3":
            config = Gemma3TextConfig(**SMALL, sliding_window=3, layer_types=KINDS, final_logit_softcapping=5.0)
            return Gemma3ForCausalLM(config)
        case "gpt2":
            sizes = {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "vocab_size": VOCAB, "n_positions": 32}
            return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        case "opt":
            sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_attention_heads": 4}
            return OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=VOCAB, dropout=0.0))
        case "granite":
            odd = {"embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.6}
            return GraniteForCausalLM(GraniteConfig(**SMALL, **odd, attention_multiplier=0.3))
        case "mixtral":
            return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))
        case "falcon_h1":
            return FalconH1ForCausalLM(
                FalconH1Config(**SMALL, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)
            )


def inputs_of(kind):
    input_ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    if kind == "padded":
        mask = torch.ones_like(input_ids)
        mask[1, -3:] = 0
        return {"input_ids": input_ids, "attention_mask": mask}
    return {"input_ids": input_ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)}


def loss_of(logits, inputs):
    labels = inputs["input_ids"].masked_fill(inputs.get("attention_mask", torch.ones(())) == 0, -100)
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), shifted_labels(labels).flatten(), ignore_index=-100, reduction="sum"
    )


def cut(whole, ranges, ranks):
    """A model of each rank; `ranks` names the rank of each stage."""
    models = [deepcopy(whole) for _ in range(max(ranks) + 1)]
    staged = []
    for rank, model in enumerate(models):
        own = [stage for stage, owner in enumerate(ranks) if owner == rank]
        staged.append(split_into_stages(model, ranges, own, ranks.__getitem__))
    return models, staged


def run(models, ranks, inputs, end=loss_of):
    """Loss, after every parameter has its gradient."""
    sent, received, hidden = [], [], None
    for stage, rank in enumerate(ranks):
        output = models[rank](pipeline_stage=stage, hidden_states=hidden, use_cache=False, **inputs)
        sent.append(output if stage < len(ranks) - 1 else end(output.logits, inputs))
        hidden = sent[-1].detach().requires_grad_()
        received.append(hidden)
    sent[-1].backward()
    for output, leaf in zip(sent[-2::-1], received[-2::-1], strict=True):
        output.backward(leaf.grad)
    return sent[-1].item()


def check(whole, models, loss, expected, tolerance=1e-12):
    assert loss == pytest.approx(expected, rel=tolerance)
    for name, parameter in whole.named_parameters():
        held = [dict(model.named_parameters()).get(name) for model in models]
        total = sum(p.grad for p in held if p is not None and p.grad is not None)
        assert parameter.grad.any() or "bias" in name
        assert (total - parameter.grad).abs().max() <= tolerance * parameter.grad.abs().max() + 1e-15, name


LAYOUTS = {
    "two ranks": ([(0, 1), (1, 4)], (0, 1)),
    "three ranks": ([(0, 1), (1, 2), (2, 4)], (0, 1, 2)),
    "virtual stages": ([(0, 1), (1, 2), (2, 3), (3, 4)], (0, 1, 0, 1)),
    "a V": ([(0, 1), (1, 2), (2, 3), (3, 4)], (0, 1, 1, 0)),
}
NAMES = ("tied llama", "sliding qwen2", "gemma3", "gpt2", "opt", "granite", "mixtral", "falcon_h1")
SOME = list(zip(NAMES, cycle(LAYOUTS), strict=False))
ALL = list(product(NAMES, LAYOUTS))


@pytest.mark.parametrize("cells", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_stages_give_loss_and_gradients_of_the_whole_model(cells):
    for name, layout in cells:
        check_stages(name, layout)


def check_stages(name, layout):
    # Its grouped matrix product knows no float64.
    whole, tolerance = (make(name).float(), 1e-5) if name == "mixtral" else (make(name).double(), 1e-12)
    ranges, ranks = LAYOUTS[layout]
    for kind in ("padded", "packed") if name not in ("opt", "falcon_h1") else ("padded",):
        inputs = inputs_of(kind)
        whole.zero_grad()
        models, _ = cut(whole, ranges, ranks)
        expected = loss_of(whole(**inputs, use_cache=False).logits, inputs)
        expected.backward()
        loss = run(models, ranks, inputs)
        check(whole, models, loss, expected.item(), tolerance)


def test_recomputed_layers_give_the_same_gradients():
    whole = make("tied llama").double().train()
    inputs = inputs_of("padded")
    expected = loss_of(whole(**inputs, use_cache=False).logits, inputs)
    expected.backward()
    whole.gradient_checkpointing_enable({"use_reentrant": False})
    ranges, ranks = LAYOUTS["virtual stages"]
    models, _ = cut(whole, ranges, ranks)
    for model in models:
        model.zero_grad()
    calls = []
    models[1].model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    check(whole, models, run(models, ranks, inputs), expected.item())
    assert len(calls) == 2  # once more in the backward pass


def test_the_last_stage_computes_its_loss_in_chunks():
    whole = make("gemma3")
    inputs, ranks = inputs_of("padded"), (0, 1)
    models, _ = cut(whole, [(0, 2), (2, 4)], ranks)
    chunk_cross_entropy(models[1], 4, CrossEntropy())
    hidden = models[0](pipeline_stage=0, **inputs)
    labels = shifted_labels(inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100))
    chunked = models[1](pipeline_stage=1, hidden_states=hidden, shifted_labels=labels, **inputs)["loss_sum"]
    chunked.backward()
    whole_loss = loss_of(whole(**inputs).logits, inputs)
    whole_loss.backward()
    assert chunked.item() == pytest.approx(whole_loss.item(), rel=1e-5)
    torch.testing.assert_close(models[1].model.norm.weight.grad, whole.model.norm.weight.grad)


def test_each_parameter_is_owned_once_and_a_tied_one_copied():
    whole = make("tied llama")
    models, staged = cut(whole, *LAYOUTS["three ranks"])
    names = [name for name, _ in whole.named_parameters()]
    assert list(staged[0].owners) == list(staged[0].shapes) == names
    assert all(each.owners == staged[0].owners and each.replicas == staged[0].replicas for each in staged)
    assert staged[0].replicas == {"model.embed_tokens.weight": (2,)}
    for rank, (model, each) in enumerate(zip(models, staged, strict=True)):
        held = [name for name, _ in model.named_parameters()]
        assert held == [n for n in names if rank in (each.owners[n], *each.replicas.get(n, ()))]
        assert set(model.state_dict()) <= set(whole.state_dict())
        assert set(each.parameters_of(rank)) == set(model.parameters())
    assert models[2].lm_head.weight is models[2].model.embed_tokens.weight
    assert cut(whole, *LAYOUTS["a V"])[1][0].replicas == {}  # the first and the last stage are on one rank


def test_a_list_of_layers_is_as_long_as_the_whole_one():
    whole = make("gemma3")
    layers = cut(whole, *LAYOUTS["two ranks"])[0][0].model.layers
    assert isinstance(layers, StageLayers) and len(layers) == LAYERS and list(layers._modules) == ["0"]
    assert [layer.layer_type if hasattr(layer, "layer_type") else i for i, layer in enumerate(layers)] == [
        layer.layer_type if hasattr(layer, "layer_type") else i for i, layer in enumerate(whole.model.layers)
    ]
    assert all(isinstance(layer, type(whole.model.layers[0])) for layer in layers)
    assert len(layers[1:3]) == 2 and isinstance(layers[-1], type(whole.model.layers[0]))
    with pytest.raises(IndexError):
        layers[LAYERS]


def test_values_of_other_stages_are_freed():
    model = make("tied llama")
    gone = weakref.ref(model.model.layers[3].mlp.up_proj.weight)
    split_into_stages(model, [(0, 1), (1, 4)], [0], int)
    gc.collect()
    assert gone() is None


def test_a_stage_before_the_last_keeps_nothing_of_what_comes_after_it():
    ranges, ranks = LAYOUTS["a V"]  # rank 0 has the norm and the head too
    models, _ = cut(make("tied llama"), ranges, ranks)
    ran = []
    for module in (models[0].model.norm, models[0].lm_head, models[0].model.layers[3]):
        module.register_forward_hook(lambda module, *_: ran.append(type(module).__name__))
    models[0](pipeline_stage=0, **inputs_of("padded"))
    assert ran == []


# Refusals


def test_a_part_of_a_model_does_not_run_alone():
    models, _ = cut(make("tied llama"), *LAYOUTS["three ranks"])
    for model in models:
        with pytest.raises(ModelError, match="another pipeline stage has it"):
            model(**inputs_of("padded"))


def test_a_wrong_number_of_layers_is_refused():
    with pytest.raises(ModelError, match=r"has 4 layers, and the stages have 5[\s\S]*parallel\.pp_split"):
        split_into_stages(make("tied llama"), [(0, 2), (2, 5)], [0], int)


def test_layers_that_are_skipped_at_random_are_refused():
    model = make("opt")
    model.model.decoder.layerdrop = 0.1
    with pytest.raises(ModelError, match=r"layerdrop of 0\.1"):
        split_into_stages(model, [(0, 2), (2, 4)], [0], int)


def test_what_is_no_causal_language_model_is_refused():
    with pytest.raises(ModelError, match="the model is a Linear"):
        split_into_stages(nn.Linear(2, 2), [(0, 1), (1, 2)], [0], int)


def test_layers_that_share_a_parameter_are_refused():
    model = make("tied llama")
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(ModelError, match="is shared by stages 0, 1 of 2") as error:
        split_into_stages(model, [(0, 2), (2, 4)], [0], int)
    assert "parallel.pp" in error.value.change


class _Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def test_a_module_that_small_models_of_the_class_do_not_have_is_refused():
    model = make("tied llama")
    model.extra = _Extra()
    with pytest.raises(ModelError, match="has parameters in extra"):
        split_into_stages(model, [(0, 2), (2, 4)], [0], int)
