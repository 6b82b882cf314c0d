"""A checkpoint of text and images: what its language model alone leaves behind, and what the whole is saved with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from ds_trainer import log
from ds_trainer.checkpoint.export import export_model, prove_export
from ds_trainer.config.schema import RunConfig
from ds_trainer.models.build import build_model
from ds_trainer.models.load_weights import load_full
from ds_trainer.planning.checkpoint_spec import read_spec

PROCESSORS = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
    "processor_config.json": {"processor_class": "Qwen3VLProcessor", "auto_map": {"AutoProcessor": "own.Own"}},
    "chat_template.json": {"chat_template": "{{ messages }}"},
}
TEXT = dict(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    max_position_embeddings=64,
)
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=32, num_position_embeddings=16
)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "_seen", set())
    torch.manual_seed(0)
    folder = tmp_path / "source"
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION)).save_pretrained(folder)
    for name, content in PROCESSORS.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "own.py").write_text("class Own: pass\n")
    return folder


def build(source, auto_class):
    config = RunConfig.model_validate({"model": {"path": str(source), "auto_class": auto_class}})
    model, weights = build_model(config, None, read_spec(str(source)), None)
    load_full(model, weights, torch.device("cpu"), torch.float32)
    return model


def export(model, folder):
    parameters = ((name, p.detach()) for name, p in model.named_parameters())
    export_model(parameters, model, None, str(folder), dtype=torch.float32, max_shard_size="5GB", is_writer=True)
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.case("K6")
def test_what_the_language_model_leaves_behind_is_said_with_the_class_that_keeps_it(source, tmp_path):
    model = build(source, "AutoModelForCausalLM")
    stored = load_file(source / "model.safetensors")
    left = sum(".visual." in name for name in stored)
    (text,) = log._seen
    assert left > 10 and f"{left} of {len(stored)} tensors of {source} are left behind (model.visual)" in text
    assert "model.auto_class AutoModelForImageTextToText keeps them" in text
    prove_export(model)
    assert not export(model, tmp_path / "out") & PROCESSORS.keys(), "a language model has no use for them"


@pytest.mark.case("K6")
def test_what_is_trained_as_a_whole_is_exported_with_all_that_a_reader_needs(source, tmp_path):
    model = build(source, "AutoModelForImageTextToText")
    assert not log._seen
    prove_export(model)
    names = export(model, tmp_path / "out")
    assert names >= PROCESSORS.keys() | {"own.py"}
    for name in PROCESSORS:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", source))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
