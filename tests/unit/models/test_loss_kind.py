"""What decides the loss is what a class is, not its name."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GenerationMixin,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from ds_trainer.models.loss_kind import loss_kind
from tests.helpers.tiny import tiny_llama

LLAMA = tiny_llama().config


class MyModel(LlamaForCausalLM):
    pass


class Decoder(LlamaPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class NamedForCausalLM(nn.Module):
    def forward(self, input_ids, labels):
        return {"loss": input_ids.float().mean(), "logits": input_ids}


class MyBert(BertForMaskedLM):
    def forward(self, **inputs):
        return super().forward(**inputs)


def bert(cls):
    return cls(BertConfig(vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=65, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))


@pytest.mark.case("K3")
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (tiny_llama, "causal_lm"),
        (lambda: MyModel(LLAMA), "causal_lm"),
        (lambda: torch.compile(MyModel(LLAMA)), "causal_lm"),
        (lambda: Decoder(LLAMA), "causal_lm"),
        (NamedForCausalLM, "unknown"),
        (lambda: LlamaForSequenceClassification(LLAMA), "mean_of_labels"),
        (lambda: bert(BertForMaskedLM), "mean_of_labels"),
        (lambda: bert(MyBert), "unknown"),
        (t5, "mean_of_labels"),
    ],
    ids=["llama", "derived", "compiled", "decoder", "by-name", "classifier", "masked", "masked-derived", "t5"],
)
def test_the_kind_of_a_models_loss(model, kind):
    assert loss_kind(model()) == kind
