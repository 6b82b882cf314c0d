"""An accelerate YAML becomes a run that means the same, and every key of it is accounted for."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING as TO_FSDP2
from accelerate.commands.to_fsdp2 import ConversionStatus, convert_config_to_fsdp2
from accelerate.utils import constants
from accelerate.utils.dataclasses import ComputeEnvironment, DistributedType, DynamoBackend, PrecisionType

from ds_trainer.config.accelerate.arguments import to_accelerate_yaml
from ds_trainer.config.backend import backend
from ds_trainer.config.io import load_config
from ds_trainer.config.keys import flatten, value
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.interop.accelerate.enums import ENUM_VALUES, FSDP_ENUM_VALUES, STRATEGIES
from ds_trainer.interop.accelerate.importer import from_accelerate
from tests.helpers.foreign_configs import (
    ACCELERATE_DEEPSPEED_FILE,
    ACCELERATE_FILES,
    ACCELERATE_FSDP1,
    HF_ZERO3,
)
from tests.helpers.shipped_configs import WHOLE_MODELS, resolved
from tests.helpers.table import table


def imported(text, folder=Path()):
    native = yaml.safe_load(text) if isinstance(text, str) else text
    return from_accelerate(native, folder / "accelerate.yaml")


def tree(native):
    return flatten(imported(native).tree)


def line(found, key):
    (only,) = [line for line in found.lines if line.key == key]
    return only


def fsdp(**section):
    return {
        "distributed_type": "FSDP",
        "num_machines": 4,
        "fsdp_config": {f"fsdp_{name}": item for name, item in section.items()},
    }


@pytest.mark.parametrize("name", ACCELERATE_FILES)
def test_every_key_of_a_file_has_one_line_and_the_rest_are_defaults(name):
    native = yaml.safe_load(ACCELERATE_FILES[name])
    found = imported(native)
    lines, written = [line.key for line in found.lines], flatten(native)
    assert len(lines) == len(set(lines)) and set(written) <= set(lines)
    assert all(line.value == written.get(line.key) for line in found.lines)
    assert all(line.note for line in found.lines if line.outcome != "carried")
    load_config(found.tree)


@pytest.mark.parametrize(
    "name, ours",
    [
        (
            "deepspeed",
            {
                "parallel.engine": "deepspeed",
                "zero.stage": 3,
                "zero.offload_optimizer.device": "cpu",
                "zero.offload_param.device": "none",
                "batch.accumulation": 4,
                "optimizer.max_grad_norm": 0.7,
                "precision.dtype": "bf16",
                "precision.grad_dtype": "bf16",
            },
        ),
        (
            "fsdp1",
            {
                "parallel.engine": "fsdp2",
                "fsdp.reshard_after_forward": False,
                "fsdp.cpu_offload": True,
                "fsdp.auto_wrap_policy": "transformer_based_wrap",
                "fsdp.transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "LlamaMLP"],
                "model.gradient_checkpointing": True,
                "precision.dtype": "bf16",
                "precision.grad_dtype": "bf16",
            },
        ),
        (
            "fsdp2",
            {
                "parallel.engine": "fsdp2",
                "parallel.dp_replicate": 2,
                "parallel.dp_shard": 8,
                "fsdp.reshard_after_forward": True,
                "fsdp.cpu_offload": False,
                "fsdp.auto_wrap_policy": "size_based_wrap",
                "fsdp.min_num_params": 1000000,
                "model.gradient_checkpointing": False,
                "precision.dtype": "fp32",
            },
        ),
        ("multi_gpu", {"parallel.engine": "ddp", "precision.dtype": "fp16", "model.compile": True}),
    ],
)
def test_a_file_keeps_its_meaning(name, ours):
    found = tree(ACCELERATE_FILES[name])
    defaults = {line.ours[0] for line in imported(ACCELERATE_FILES[name]).lines if line.value is None and line.ours}
    assert {key: found.get(key) for key in ours} == ours
    assert set(found) == set(ours) | defaults


@pytest.mark.parametrize("place", ["beside the YAML", "in the working directory"])
def test_a_deepspeed_file_is_read_too(tmp_path, monkeypatch, place):
    (tmp_path / "ds.json").write_text(HF_ZERO3)
    monkeypatch.chdir(tmp_path if place == "in the working directory" else "/")
    found = imported(ACCELERATE_DEEPSPEED_FILE, tmp_path if place == "beside the YAML" else tmp_path / "configs")
    assert flatten(found.tree)["zero.offload_param.device"] == "cpu"
    assert line(found, "ds.json: zero_optimization.stage").ours == ("zero.stage",)
    assert len({line.key for line in found.lines}) == len(found.lines)
    load_config(found.tree)


@pytest.mark.parametrize(
    "mixed_precision, dtype", [("no", "fp32"), (False, "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "bf16")]
)
def test_mixed_precision_is_the_number_format(mixed_precision, dtype):
    found = imported({"distributed_type": "MULTI_GPU", "mixed_precision": mixed_precision})
    assert flatten(found.tree)["precision.dtype"] == dtype
    assert line(found, "mixed_precision").outcome == ("changed" if mixed_precision == "fp8" else "carried")


def test_a_deepspeed_file_rules_over_mixed_precision_no(tmp_path):
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    found = imported(ACCELERATE_DEEPSPEED_FILE + "mixed_precision: 'no'\n", tmp_path)
    assert flatten(found.tree)["precision.dtype"] == "bf16"


@table(
    "strategy, ours",
    [
        ("FULL_SHARD", {"parallel.engine": "fsdp2", "fsdp.reshard_after_forward": True}),
        (1, {"parallel.engine": "fsdp2", "fsdp.reshard_after_forward": True}),
        ("SHARD_GRAD_OP", {"parallel.engine": "fsdp2", "fsdp.reshard_after_forward": False}),
        ("NO_SHARD", {"parallel.engine": "ddp"}),
        ("HYBRID_SHARD", {"fsdp.reshard_after_forward": True, "parallel.dp_replicate": 4}),
        ("HYBRID_SHARD_ZERO2", {"fsdp.reshard_after_forward": False, "parallel.dp_replicate": 4}),
    ],
)
@table("key", ["sharding_strategy", "reshard_after_forward"])
def test_fsdp1s_strategies_have_fsdp2s_words(key, strategy, ours):
    native = fsdp(**{key: strategy, "offload_params": False, "backward_prefetch": "BACKWARD_PRE"})
    found = tree(native)
    assert {key: found.get(key) for key in ours} == ours
    assert ("fsdp.reshard_after_forward" in found) == ("fsdp.reshard_after_forward" in ours)
    load_config(imported(native).tree)


def test_fsdp1_is_carried_as_accelerate_itself_carries_it():
    found = imported(ACCELERATE_FSDP1)
    ours = convert_config_to_fsdp2(yaml.safe_load(ACCELERATE_FSDP1))
    for key, theirs in TO_FSDP2.items():
        if key in yaml.safe_load(ACCELERATE_FSDP1)["fsdp_config"] and theirs is ConversionStatus.REMOVED:
            assert line(found, f"fsdp_config.{key}").outcome == "dropped", key
    same = {key: item for key, item in tree(ours).items() if key != "parallel.engine"}
    assert same.items() <= tree(ACCELERATE_FSDP1).items()
    assert line(found, "fsdp_config.fsdp_version").outcome == "changed"


def test_what_an_fsdp_file_leaves_out_is_as_accelerate_has_it():
    found = tree(fsdp() | {"mixed_precision": "bf16"})
    assert found["fsdp.auto_wrap_policy"] == "no_wrap" and found["precision.grad_dtype"] == "bf16"


@table(
    "native, key, outcome, part",
    [
        (
            fsdp(forward_prefetch=True, auto_wrap_policy="TRANSFORMER_BASED_WRAP"),
            "fsdp_config.fsdp_forward_prefetch",
            "changed",
            "backward",
        ),
        (fsdp(forward_prefetch=True), "fsdp_config.fsdp_forward_prefetch", "dropped", "at once"),
        (fsdp(cpu_ram_efficient_loading=False), "fsdp_config.fsdp_cpu_ram_efficient_loading", "changed", "slices"),
        (fsdp(cpu_ram_efficient_loading="false"), "fsdp_config.fsdp_cpu_ram_efficient_loading", "changed", "slices"),
        (
            fsdp(version=2, sharding_strategy="NO_SHARD"),
            "fsdp_config.fsdp_sharding_strategy",
            "dropped",
            "FSDP2 does not",
        ),
        (fsdp(state_dict_type="FULL_STATE_DICT"), "fsdp_config.fsdp_state_dict_type", "dropped", "checkpoint.export"),
        (fsdp(min_num_params=5), "fsdp_config.fsdp_min_num_params", "dropped", "NO_WRAP"),
        ({"distributed_type": "MULTI_XPU"}, "distributed_type", "changed", "CUDA"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type", "dropped", "set parallel.engine"),
        (
            {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_use_distributed_optimizer": True}},
            "megatron_lm_config.megatron_lm_use_distributed_optimizer",
            "dropped",
            "Megatron-LM",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {"megatron_lm_num_layers_per_virtual_pipeline_stage": 2},
            },
            "megatron_lm_config.megatron_lm_num_layers_per_virtual_pipeline_stage",
            "dropped",
            "set parallel.schedule to interleaved_1f1b and parallel.virtual_stages",
        ),
        (
            {"distributed_type": "MULTI_GPU", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
            "megatron_lm_config.megatron_lm_tp_degree",
            "dropped",
            "does not read it",
        ),
        (
            {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}},
            "fsdp_config.fsdp_version",
            "dropped",
            "does not read it",
        ),
        (
            {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_tp_size": 2}},
            "parallelism_config.parallelism_config_tp_size",
            "carried",
            "shards the layers",
        ),
        (
            {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_cp_size": 2}},
            "parallelism_config.parallelism_config_cp_size",
            "dropped",
            "sequences are not sharded",
        ),
        ({"distributed_type": "NO", "dynamo_backend": "EAGER"}, "dynamo_backend", "changed", "inductor"),
        ({"distributed_type": "NO", "num_processes": 8}, "num_processes", "dropped", "torchrun"),
        ({"distributed_type": "NO", "debug": False}, "debug", "carried", "accelerate's own"),
        ({"distributed_type": "NO", "debug": True}, "debug", "dropped", "accelerate's own"),
        ({"distributed_type": "NO", "tpu_use_sudo": False}, "tpu_use_sudo", "carried", "off"),
        ({"distributed_type": "NO", "mixed_precision": "fp8"}, "mixed_precision", "changed", "bf16 is used"),
    ],
)
def test_what_is_not_the_same_here_says_so(native, key, outcome, part):
    found = imported(native)
    assert line(found, key).outcome == outcome and part in line(found, key).note
    load_config(found.tree)


@table(
    "native, parts",
    [
        (fsdp(sharding_strategy="WHAT"), ["fsdp_config.fsdp_sharding_strategy is 'WHAT'", "SHARD_GRAD_OP"]),
        (fsdp(sharding_strategy=6), ["fsdp_sharding_strategy is 6", "FULL_SHARD"]),
        (fsdp(version=3), ["fsdp_config.fsdp_version is 3", "1, 2"]),
        (fsdp(version=2, auto_wrap_policy="WHAT"), ["fsdp_auto_wrap_policy is 'WHAT'", "SIZE_BASED_WRAP"]),
        (
            fsdp(state_dict_type="WHAT", backward_prefetch="X"),
            ["fsdp_state_dict_type", "fsdp_backward_prefetch is 'X'"],
        ),
        ({"distributed_type": "WHAT"}, ["distributed_type is 'WHAT'", "MULTI_GPU"]),
        ({"distributed_type": "NO", "mixed_precision": "int4"}, ["mixed_precision is 'int4'", "no, bf16, fp16, fp8"]),
        ({"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "X"}}, ["dynamo_config.dynamo_backend is 'X'"]),
    ],
)
def test_a_word_that_accelerate_does_not_know_is_refused_with_those_it_knows(native, parts):
    with pytest.raises(ConfigErrors) as refused:
        imported(native)
    for part in [*parts, "rule:", "change:"]:
        assert part in str(refused.value)


def test_a_strategy_that_fsdp2_does_not_read_is_no_matter():
    assert (
        line(imported(fsdp(version=2, sharding_strategy="WHAT")), "fsdp_config.fsdp_sharding_strategy").outcome
        == "dropped"
    )


def test_the_words_are_those_of_the_installed_accelerate():
    assert tuple(constants.FSDP_SHARDING_STRATEGY) == STRATEGIES
    assert set(FSDP_ENUM_VALUES["auto_wrap_policy"]) == set(constants.FSDP_AUTO_WRAP_POLICY)
    assert set(FSDP_ENUM_VALUES["backward_prefetch"]) == set(constants.FSDP_BACKWARD_PREFETCH)
    assert set(FSDP_ENUM_VALUES["state_dict_type"]) == set(constants.FSDP_STATE_DICT_TYPE)
    assert set(ENUM_VALUES["dynamo_mode"]) == set(constants.TORCH_DYNAMO_MODES)
    assert set(ENUM_VALUES["distributed_type"]) == {each.value for each in DistributedType}
    assert set(ENUM_VALUES["mixed_precision"]) == {each.value for each in PrecisionType}
    assert {word.upper() for word in ENUM_VALUES["dynamo_backend"]} == {each.value for each in DynamoBackend}
    assert set(ENUM_VALUES["compute_environment"]) == {each.value for each in ComputeEnvironment}


@pytest.mark.parametrize("name", ACCELERATE_FILES)
def test_a_line_that_leads_nowhere_says_why(name):
    assert all(line.ours or line.note for line in imported(ACCELERATE_FILES[name]).lines)


def test_a_config_without_a_kind_is_refused():
    with pytest.raises(ConfigError, match="without distributed_type"):
        imported({"mixed_precision": "bf16"})


SAID = {
    "deepspeed": {
        "batch.accumulation",
        "optimizer.max_grad_norm",
        "precision.dtype",
        "zero.stage",
        "zero.offload_optimizer.device",
        "zero.offload_param.device",
    },
    "fsdp2": {
        "fsdp.auto_wrap_policy",
        "fsdp.cpu_offload",
        "fsdp.reshard_after_forward",
        "model.gradient_checkpointing",
        "precision.dtype",
    },
    "ddp": {"precision.dtype"},
}
"""Backend -> keys that accelerate's YAML has."""

NO_WORD = {
    ("fsdp.auto_wrap_policy", None): "transformer_based_wrap",
    ("model.gradient_checkpointing", "selective"): True,
}
"""Key and value that the YAML says less exactly -> what it says."""


@table("name", WHOLE_MODELS)
def test_a_shipped_config_comes_back_from_accelerates_yaml(name):
    run = resolved(name)
    found = imported(yaml.safe_dump(to_accelerate_yaml(run)))
    said = {key for line in found.lines if line.value is not None for key in line.ours}
    assert said >= SAID[backend(run.config)]
    back = flatten(found.tree)
    assert back["parallel.engine"] == backend(run.config)
    for key in said - {"parallel.engine"}:
        item = value(run.config, key)
        assert back[key] == NO_WORD.get((key, item), item), key


def test_megatrons_pipeline_is_carried_with_its_micro_batches():
    section = {"megatron_lm_pp_degree": 4, "megatron_lm_num_micro_batches": 16, "megatron_lm_tp_degree": 1}
    found = flatten(tree({"distributed_type": "MEGATRON_LM", "megatron_lm_config": section}))
    assert (found["parallel.pp"], found["batch.accumulation"]) == (4, 16)


@pytest.mark.parametrize(
    ("degree", "ours"), [(2, {"parallel.tp": 2, "parallel.sequence_parallel": True}), (1, {"parallel.tp": 1})]
)
def test_megatrons_tensor_and_sequence_parallelism_are_carried(degree, ours):
    section = {"megatron_lm_tp_degree": degree, "megatron_lm_sequence_parallelism": True}
    found = tree({"distributed_type": "MEGATRON_LM", "megatron_lm_config": section})
    assert {key: item for key, item in flatten(found).items() if key.startswith("parallel.")} == ours


@pytest.mark.case("M3")
def test_a_deepspeed_file_that_is_missing_is_named_with_the_yaml(tmp_path):
    native = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    with pytest.raises(ConfigError) as caught:
        imported(native, tmp_path)
    yaml_file = tmp_path / "accelerate.yaml"
    assert caught.value.found == (
        f"{yaml_file} names ds.json as deepspeed_config.deepspeed_config_file, and there is no file {tmp_path}/ds.json"
    )
    assert caught.value.change.startswith(f"correct deepspeed_config_file in {yaml_file}")
