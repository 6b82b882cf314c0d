"""The exported folder against transformers' own, and what a failure leaves behind."""

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer.checkpoint.export import export_model
from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import MachineError, ModelError
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.load_weights import load_full
from ds_trainer.models.pretrained import build_skeleton
from tests.helpers.checkpoints import KINDS, edit_config, make_checkpoint, make_model
from tests.helpers.tokenizers import CHAT_TEMPLATE, make_tokenizer


def load(folder, dtype=torch.float32):
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    load_full(model, CheckpointWeights(folder, model), torch.device("cpu"), dtype)
    return model


def parameters(model):
    """What an engine yields."""
    return ((name, p.detach()) for name, p in model.named_parameters())


def export(model, folder, tokenizer=None, dtype=torch.float32, max_shard_size="5GB"):
    export_model(
        parameters(model), model, tokenizer, str(folder), dtype=dtype, max_shard_size=max_shard_size, is_writer=True
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.case("D1")
@pytest.mark.case("D3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_equals_that_of_save_pretrained_byte_for_byte(tmp_path, kind, dtype):
    source = make_checkpoint(tmp_path / "source", kind)
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(tmp_path / "theirs")
    export(load(source), tmp_path / "ours", dtype=dtype)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


@pytest.mark.case("D3")
@pytest.mark.parametrize("kind, heads", [("llama", 1), ("llama_tied", 0)])
def test_a_tied_head_is_not_written_and_an_untied_one_is(tmp_path, kind, heads):
    export(load(make_checkpoint(tmp_path / "source", kind)), tmp_path / "out")
    assert sum(name == "lm_head.weight" for name in load_file(tmp_path / "out" / "model.safetensors")) == heads


def test_a_tied_parameter_is_written_under_transformers_name_whatever_the_engine_calls_it(tmp_path):
    model = make_model("llama_tied")
    name = "model.embed_tokens.weight"
    renamed = (("lm_head.weight" if n == name else n, t) for n, t in parameters(model))
    export_model(renamed, model, None, str(tmp_path / "out"), dtype=torch.float32, max_shard_size="5GB", is_writer=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in written
    assert torch.equal(written[name], model.lm_head.weight)


@pytest.mark.parametrize("kind", ["llama_tied", "mixtral"])
def test_shards_stay_below_the_limit_and_load_without_missing_or_unexpected_keys(tmp_path, kind):
    model = make_model(kind)
    export(model, tmp_path / "out", max_shard_size="60KB")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    assert [s.name for s in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    for shard in shards:
        assert sum(tensor.nbytes for tensor in load_file(shard).values()) <= 60_000
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.case("D1")
def test_parameters_cut_by_an_engine_are_exported_whole_from_what_it_yields(tmp_path):
    model = make_model("mixtral")
    ids = torch.arange(3, 27).view(2, 12)
    logits = model.eval()(ids).logits
    whole = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    for p in model.parameters():  # As ZeRO-3 leaves them.
        p.data = torch.empty(0)
    export_model(
        iter(whole), model, None, str(tmp_path / "out"), dtype=torch.float32, max_shard_size="5GB", is_writer=True
    )
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(ids).logits, logits)


def test_tokenizer_and_chat_template_are_written(tmp_path):
    export(make_model("llama"), tmp_path / "out", make_tokenizer())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_settings_of_generation_that_transformers_would_refuse_to_save_are_kept(tmp_path):
    source = make_checkpoint(tmp_path / "source")
    path = Path(source, "generation_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.6, "do_sample": False}))
    export(load(source), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["temperature"], written["do_sample"]) == (0.6, False)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_cache_setting_of_the_source_is_written_back(tmp_path, use_cache):
    source = make_checkpoint(tmp_path / "source")
    edit_config(source, use_cache=use_cache)
    export(load(source), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is use_cache


def test_an_earlier_export_is_replaced_and_other_files_in_its_folder_stay(tmp_path):
    out = tmp_path / "out"
    export(make_model("llama", seed=0), out, max_shard_size="60KB")
    (out / "notes.txt").write_text("mine")
    (out / "checkpoint-10").mkdir()
    export(make_model("llama", seed=1), out)
    expected = make_model("llama", seed=1).state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in AutoModelForCausalLM.from_pretrained(out).state_dict().items())
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
        "checkpoint-10",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def fail_full_disk(monkeypatch, out):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))


def fail_while_writing(monkeypatch, out):
    def save_file(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ds_trainer.checkpoint.export.save_file", save_file)


def fail_rename(monkeypatch, out):
    rename = Path.rename

    def refuse(self, target):
        if self.name == ".out.partial":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)


@pytest.mark.parametrize("fail", [fail_full_disk, fail_while_writing, fail_rename])
def test_a_machine_fault_names_the_folder_keeps_what_was_there_and_drains_the_collective(tmp_path, monkeypatch, fail):
    out = tmp_path / "out"
    export(make_model("llama", seed=0), out)
    before = contents(out)
    fail(monkeypatch, out)
    model, taken = make_model("llama", seed=1), []

    def counted():
        for item in parameters(model):
            taken.append(item[0])
            yield item

    with pytest.raises(MachineError, match=str(out)):
        export_model(counted(), model, None, str(out), dtype=torch.float32, max_shard_size="5GB", is_writer=True)
    assert len(taken) == len(list(model.parameters()))
    assert contents(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path):
    model = make_model("llama")
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds values that are NaN"):
        export(model, tmp_path / "out")
    assert not os.listdir(tmp_path)


def test_a_parameter_that_the_engine_did_not_yield_is_found_before_publishing(tmp_path):
    model = make_model("llama")
    some = ((name, p) for name, p in parameters(model) if name != "model.norm.weight")
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        export_model(
            some, model, None, str(tmp_path / "out"), dtype=torch.float32, max_shard_size="5GB", is_writer=True
        )
    assert not os.listdir(tmp_path)


def test_a_rank_that_does_not_write_only_drains(tmp_path):
    model = make_model("llama")
    items = parameters(model)
    export_model(items, model, None, str(tmp_path / "out"), dtype=torch.float32, max_shard_size="5GB", is_writer=False)
    assert next(items, None) is None
    assert not os.listdir(tmp_path)


CUSTOM_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class ShippedConfig(LlamaConfig):
    model_type = "shipped"


class ShippedForCausalLM(LlamaForCausalLM):
    config_class = ShippedConfig
"""


def test_a_checkpoint_s_own_code_needs_trust_and_is_exported_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = make_checkpoint(tmp_path / "source")
    Path(source, "shipped.py").write_text(CUSTOM_CODE)
    classes = {"AutoConfig": "shipped.ShippedConfig", "AutoModelForCausalLM": "shipped.ShippedForCausalLM"}
    edit_config(source, model_type="shipped", auto_map=classes, architectures=["ShippedForCausalLM"])
    with pytest.raises(ModelError, match=r"model\.trust_remote_code"):
        load(source)
    model = build_skeleton(source, ModelConfig(trust_remote_code=True), torch.float32)
    load_full(model, CheckpointWeights(source, model), torch.device("cpu"), torch.float32)
    export(model, tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(reloaded).__name__ == "ShippedForCausalLM"
    assert torch.equal(reloaded.lm_head.weight, model.lm_head.weight)
