"""What config.json and safetensors headers say, and what a broken folder leads to."""

import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from ds_trainer.errors import ModelError
from ds_trainer.models.hub import resolve_folder
from ds_trainer.planning.checkpoint_spec import families, read_spec
from ds_trainer.planning.positions import position_limit


def write(folder: Path, config: dict, tensors: dict[str, tuple], file: str = "model.safetensors") -> str:
    """A checkpoint whose fp32 tensors hold zeros."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return str(folder)


REMAKE = "run `make families`"
LLAMA = {"model_type": "llama", "hidden_size": 4, "vocab_size": 10, "max_position_embeddings": 64}
TENSORS = {"model.embed_tokens.weight": (10, 4), "model.norm.weight": (4,), "lm_head.weight": (10, 4)}


def test_names_of_the_config_are_read(tmp_path):
    spec = read_spec(write(tmp_path, LLAMA, TENSORS))
    assert (spec.model_type, spec.hidden_size, spec.vocab_size, spec.max_positions) == ("llama", 4, 10, 64)
    assert spec.tensors["model.norm.weight"].shape == (4,)
    assert spec.num_parameters == 84
    assert spec.largest_parameter == 40
    assert not spec.pickled


def test_a_family_s_own_names_and_default_of_tying_are_known(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 4, "n_positions": 32, "vocab_size": 10}
    spec = read_spec(write(tmp_path, config, {"transformer.wte.weight": (10, 4)}))
    assert (spec.hidden_size, spec.max_positions, spec.tied) == (4, 32, True)


def test_the_text_part_of_a_nested_config_counts(tmp_path):
    config = {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 4, "vocab_size": 10},
        "vision_config": {"hidden_size": 9},
    }
    assert read_spec(write(tmp_path, config, TENSORS)).hidden_size == 4


def test_an_unknown_model_type_without_sizes_leaves_them_open(tmp_path):
    spec = read_spec(write(tmp_path, {"model_type": "brand_new"}, TENSORS))
    assert (spec.hidden_size, spec.max_positions, spec.family) == (None, None, None)


@pytest.mark.parametrize("tied, expected", [(True, 44), (False, 84)])
def test_a_tied_copy_is_counted_once(tmp_path, tied, expected):
    assert read_spec(write(tmp_path, LLAMA | {"tie_word_embeddings": tied}, TENSORS)).num_parameters == expected


def test_experts_that_are_merged_on_load_count_as_one_parameter(tmp_path):
    experts = {f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight": (8, 4) for e in range(4)}
    spec = read_spec(write(tmp_path, LLAMA | {"model_type": "mixtral"}, TENSORS | experts))
    assert spec.family.conversion == "merge"
    assert spec.largest_parameter == 4 * 8 * 4


def test_shards_are_found_through_the_index(tmp_path):
    write(tmp_path, LLAMA, {"a": (2, 2)}, "model-00001-of-00002.safetensors")
    write(tmp_path, LLAMA, {"b": (3,)}, "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {name: t.file for name, t in read_spec(str(tmp_path)).tensors.items()} == weight_map
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        read_spec(str(tmp_path))


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_a_truncated_file_is_named(tmp_path, cut):
    path = Path(write(tmp_path, LLAMA, TENSORS), "model.safetensors")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match="model.safetensors is truncated or corrupt") as caught:
        read_spec(str(tmp_path))
    assert caught.value.rule and caught.value.change


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    Path(write(tmp_path, LLAMA, TENSORS), "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(str(tmp_path))


@pytest.mark.case("M3")
def test_an_adapter_is_said_to_be_one(tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ModelError, match="holds a LORA adapter of owner/base, and no model") as caught:
        read_spec(str(tmp_path))
    assert caught.value.change.startswith("set model.path to owner/base, or merge the adapter into it")


@pytest.mark.case("M2")
def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path):
    folder = write(tmp_path, LLAMA, TENSORS)
    plain, config = read_spec(folder), Path(folder, "config.json")
    config.write_text(config.read_text(), encoding="utf-8-sig")
    assert read_spec(folder) == plain


def test_a_missing_folder_config_or_weight_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        read_spec(str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"there is no .*config\.json"):
        read_spec(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        read_spec(str(tmp_path))


def test_pickled_weights_are_flagged_and_not_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    spec = read_spec(str(tmp_path))
    assert spec.pickled
    assert spec.tensors == {}


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert resolve_folder(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("path", ["nobody/no-such-model", "./no/such/folder", "/no/such/folder"])
def test_what_is_neither_a_folder_nor_a_cached_hub_id_names_the_key(path):
    with pytest.raises(ModelError, match=r"model\.path is"):
        resolve_folder(path)


def test_a_hub_id_is_found_in_the_local_cache_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    folder = write(repository / "snapshots" / "abc", LLAMA, TENSORS)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert resolve_folder("someone/tiny") == folder


def test_reading_a_spec_loads_neither_torch_nor_transformers():
    code = (
        "import sys, ds_trainer.planning.checkpoint_spec, ds_trainer.models.hub; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_the_shipped_table_is_what_the_installed_transformers_says():
    from ds_trainer.parallel.make_families import family

    told = {name: family(name) for name in families()}
    assert told == {name: {key: vars(row)[key] for key in told[name]} for name, row in families().items()}, REMAKE


@pytest.mark.slow
def test_the_shipped_table_is_what_small_models_show():
    from ds_trainer.parallel.make_families import make_families

    assert {name: vars(row) for name, row in families().items()} == make_families(), REMAKE


@pytest.mark.case("M1")
@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4}, 64),
        ({"rope_type": "default", "rope_theta": 1e4}, 64),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 64),
        (None, 64),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_scaled_rotary_embeddings_reach_the_original_positions_times_their_factor(key, rope, limit):
    assert position_limit({"max_position_embeddings": 64, key: rope}) == limit
