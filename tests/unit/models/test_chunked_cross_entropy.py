"""Cross entropy chunk by chunk is that of whole logits, whatever a class does to them after its head."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertLMHeadModel, CohereConfig, CohereForCausalLM

from ds_trainer.errors import ModelError
from ds_trainer.loss import CausalLMLoss, ChunkedCausalLMLoss, CrossEntropy, with_logits
from ds_trainer.models.chunked_cross_entropy import chunk_cross_entropy
from tests.helpers.checkpoints import VOCAB, make_model
from tests.helpers.runs import D8, collate
from tests.helpers.table import table

CHUNK = 7


def cohere():
    """Scales its logits."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    tokens = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**sizes, **tokens, logit_scale=0.3))


MODELS = {
    "untied": lambda: make_model("llama"),
    "tied": lambda: make_model("llama_tied"),
    "capped logits": lambda: make_model("gemma2", final_logit_softcapping=0.2),
    "scaled logits": cohere,
    "head with a bias": lambda: make_model("phi"),
    "linear layers the other way round": lambda: make_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "experts": lambda: make_model("mixtral"),
}


class LargestLogits(TorchDispatchMode):
    """The most rows of a tensor with one column per token of the vocabulary, made in either pass."""

    rows = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        # Not a view of the head: that has as many rows as there are hidden units.
        if torch.is_tensor(out) and out.shape[-1:] == (VOCAB,) and out.shape[:-1] != (32,):
            self.rows = max(self.rows, out.shape[:-1].numel())
        return out


def run(model, loss, batch):
    """The sum of the losses, the most logits at a time, and every gradient."""
    with LargestLogits() as logits:
        loss_sum = loss.loss_sum(model(**loss.inputs(batch)), batch, 1)
        loss_sum.backward()
    return loss_sum.detach(), logits.rows, {name: p.grad for name, p in model.named_parameters()}


def chunked(model, smoothing=0.0):
    """A deep copy, as an average of the weights over time keeps one, which must not run the original's parameters."""
    chunk_cross_entropy(model, CHUNK, CrossEntropy(smoothing))
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return twin


@table("smoothing", [0.0, 0.1])
@table("kind", MODELS)
def test_loss_and_every_gradient_are_those_of_whole_logits(kind, smoothing):
    batch = collate(D8)
    expected, whole_rows, gradients = run(MODELS[kind]().train(), CausalLMLoss(CrossEntropy(smoothing)), batch)
    got, rows, chunked_gradients = run(
        chunked(MODELS[kind]().train(), smoothing), ChunkedCausalLMLoss(CrossEntropy(smoothing)), batch
    )
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        tolerance = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(chunked_gradients[name], gradient, rtol=0, atol=tolerance, msg=name)
    assert rows == CHUNK < 400 < whole_rows == batch["labels"].numel()


def test_a_batch_without_labels_costs_one_empty_chunk_and_gives_every_parameter_a_gradient_of_zero():
    batch = collate(D8)
    batch["labels"][:] = -100
    got, rows, gradients = run(chunked(MODELS["untied"]()), ChunkedCausalLMLoss(CrossEntropy()), batch)
    assert (got.item(), rows) == (0.0, 0)
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_low_precision_logits_are_summed_in_fp32():
    batch = collate(D8)
    with torch.autocast("cpu", torch.bfloat16):
        got, *_ = run(chunked(MODELS["untied"]()), ChunkedCausalLMLoss(CrossEntropy()), batch)
        expected, *_ = run(MODELS["untied"](), CausalLMLoss(CrossEntropy()), batch)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_whole_logits_and_generation_stay_the_class_s_own():
    model, batch = MODELS["tied"]().eval(), collate(D8)
    chunk_cross_entropy(model, CHUNK, CrossEntropy())
    loss = with_logits(ChunkedCausalLMLoss(CrossEntropy(0.1)))
    assert model(**loss.inputs(batch)).logits.shape == (*batch["labels"].shape, VOCAB)
    assert loss.cross_entropy.label_smoothing == 0.1
    own = MODELS["tied"]().eval().generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4)
    assert torch.equal(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4), own)


def test_a_head_of_several_layers_is_refused():
    model = BertLMHeadModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, is_decoder=True))
    with pytest.raises(ModelError, match="beside its body and its head: cls.predictions.transform.dense.weight"):
        chunk_cross_entropy(model, CHUNK, CrossEntropy())
