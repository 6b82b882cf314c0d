"""Parameters that a checkpoint lacks: a task head begins anew, other ones only where they are named."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ModelError
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.new_weights import NewWeights
from ds_trainer.models.pretrained import build_skeleton
from tests.helpers.tiny import tiny_llama

CLASSIFIER = "AutoModelForSequenceClassification"


def opened(folder, auto_class=CLASSIFIER, patterns=None, seed=0):
    model = build_skeleton(str(folder), ModelConfig(auto_class=auto_class), torch.float32)
    return CheckpointWeights(str(folder), model, new=NewWeights(patterns, seed))


@pytest.fixture
def llama(tmp_path):
    tiny_llama(tied=False).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.case("N3")
def test_a_task_head_is_drawn_from_the_seed_and_nothing_else(llama, capsys):
    torch.manual_seed(1)
    first = opened(llama).view("score.weight").clone()
    assert "score.weight: initialised from run.seed" in capsys.readouterr().err
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(opened(llama).view("score.weight"), first), "whatever a rank has drawn before"
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(opened(llama, seed=1).view("score.weight"), first)
    assert first.std().item() == pytest.approx(0.02, rel=0.3), "as the class initialises it"


@pytest.mark.case("N3")
def test_what_is_no_task_head_is_initialised_only_where_it_is_named(llama):
    file = llama / "model.safetensors"
    tensors = load_file(file)
    kept = {name: value for name, value in tensors.items() if name not in ("lm_head.weight", "model.norm.weight")}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 2 tensors .*lm_head\.weight\n.*initialize_missing"):
        opened(llama, "AutoModelForCausalLM")
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*model\.norm\.weight"):
        opened(llama)
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*lm_head\.weight"):
        opened(llama, "AutoModelForCausalLM", ["model.norm.*"])
    named = opened(llama, "AutoModelForCausalLM", ["lm_head.weight", "model.norm.*"])
    assert named.view("model.norm.weight").eq(1).all() and not named.view("lm_head.weight").isnan().any()


def test_biases_and_a_pooler(tmp_path):
    BertForMaskedLM(
        BertConfig(vocab_size=65, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"bert\.pooler\.dense\.weight"):
        opened(tmp_path)
    weights = opened(tmp_path, patterns=["bert.pooler.*", "classifier.*"])
    assert weights.view("classifier.bias").eq(0).all() and weights.view("bert.pooler.dense.weight").any()
