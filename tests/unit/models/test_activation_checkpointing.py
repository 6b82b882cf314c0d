"""What is kept of a forward pass, and what is computed again; which modules are compiled."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.training_sections import CheckpointConfig
from ds_trainer.errors import ConfigError, ModelError
from ds_trainer.models import activation_checkpointing
from ds_trainer.models.build import build_model
from ds_trainer.models.pretrained import prepare_for_training
from tests.helpers.runs import D8, collate
from tests.helpers.tiny import tiny_llama

LAYERS = 2
COUNTED = ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::silu")
USED_PRODUCTS = 6
"""Of a block's seven; the recomputation stops before the last one, whose result no gradient needs."""


class Pass(TorchDispatchMode):
    """Counts operators, and knows which of the memory that they took is still held."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self._taken = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls[operator.name()] += 1
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self._taken.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def held_bytes(self):
        return sum({ref.cdata: size for ref, size in self._taken if not ref.expired()}.values())


def step(how):
    """Operators of both passes, bytes held between them, and the gradients."""
    model = tiny_llama(layers=LAYERS)
    prepare_for_training(model, ModelConfig(gradient_checkpointing=how))
    with Pass() as both:
        loss = model(input_ids=collate(D8)["input_ids"]).logits.logsumexp(-1).sum()
        held = both.held_bytes()
        loss.backward()
    counts = [both.calls[name] for name in COUNTED]
    return counts, held, {name: p.grad for name, p in model.named_parameters()}


def test_selective_recomputes_all_but_products_and_attention_and_keeps_only_their_results():
    (products, attentions, activations), held, gradients = step(False)
    full_counts, full_held, full_gradients = step(True)
    selective_counts, selective_held, selective_gradients = step("selective")
    assert full_counts == [products + USED_PRODUCTS * LAYERS, attentions + LAYERS, activations + LAYERS]
    assert selective_counts == [products, attentions, activations + LAYERS]
    assert full_held < selective_held < held
    for name, gradient in gradients.items():
        assert torch.equal(full_gradients[name], gradient) and torch.equal(selective_gradients[name], gradient)


@pytest.mark.case("H1")
@pytest.mark.parametrize(("how", "what"), [(True, "activations are"), ("selective", "other than results of matrix pr")])
def test_the_key_value_cache_is_switched_off_with_one_notice(capfd, how, what):
    model = tiny_llama()
    assert model.config.use_cache
    prepare_for_training(model, ModelConfig(gradient_checkpointing=how))
    assert not model.config.use_cache
    model.train()(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    said = capfd.readouterr().err
    assert what in said and said.count("cache") == 1


def test_selective_is_refused_where_transformers_recomputes_hooks_too(monkeypatch):
    class Layer:
        def __call__(self):
            """As before transformers 5.24."""

    monkeypatch.setattr(activation_checkpointing, "GradientCheckpointingLayer", Layer)
    prepare_for_training(tiny_llama(), ModelConfig(gradient_checkpointing=True))
    with pytest.raises(ModelError, match="recomputes a block together with its hooks"):
        prepare_for_training(tiny_llama(), ModelConfig(gradient_checkpointing="selective"))


@pytest.mark.parametrize("how", [True, "selective"])
def test_a_module_that_is_not_of_transformers_is_refused(how):
    run = RunConfig(model=ModelConfig(gradient_checkpointing=how))
    with pytest.raises(
        ConfigError, match="model.gradient_checkpointing is .* and Linear is not a model of transformers"
    ):
        build_model(run, nn.Linear(2, 2), None, None)


def test_compiling_a_model_without_blocks_is_refused():
    run = RunConfig(model=ModelConfig(compile=True), checkpoint=CheckpointConfig(export=False))
    with pytest.raises(ModelError, match="model.compile is true and Linear lists no blocks"):
        build_model(run, nn.Linear(2, 2), None, None)


def test_compiled_blocks_are_told_before_anything_is_compiled(capfd):
    model = tiny_llama()
    names = list(model.state_dict())
    build_model(RunConfig(model=ModelConfig(compile=True)), model, None, None)
    assert "torch.compile runs the blocks (2 LlamaDecoderLayer)" in capfd.readouterr().err
    assert list(model.state_dict()) == names
