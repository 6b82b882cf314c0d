"""Settings of accelerate launch that contradict the run's JSON."""

import pytest

from ds_trainer.config.accelerate.launcher_conflicts import check_accelerate_launch
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError
from tests.helpers.table import table

BF16 = Machine(2, "cuda", ("fp32", "bf16"), "computes in bf16")
PLAIN = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False"}
DEEPSPEED = PLAIN | {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
}
RUN = {"batch": {"accumulation": 4, "micro_size": 1}, "precision": {"dtype": "bf16"}}


def check(environ, config=RUN, machine=BF16):
    return check_accelerate_launch(environ, resolve(*load_config(config), machine))


@pytest.mark.case("A7")
@pytest.mark.parametrize("environ", [{}, PLAIN, DEEPSPEED, DEEPSPEED | {"ACCELERATE_MIXED_PRECISION": "bf16"}], ids=str)
def test_what_accelerate_says_by_default_or_as_the_json_does_is_fine(environ):
    assert check(environ) == []


def test_a_tensor_parallel_size_that_agrees_is_fine():
    four = Machine(4, "cuda", ("fp32", "bf16"), "computes in bf16")
    assert check(PLAIN | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, RUN | {"parallel": {"tp": 2}}, four) == []


def test_auto_asks_for_nothing():
    assert check(DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "auto"}) == []


CONTRADICTIONS = {
    "mixed precision": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "precision.dtype", "mixed_precision"),
    "fp8": ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "precision.dtype", "mixed_precision"),
    "accumulation": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
        "batch.accumulation",
        "gradient_accumulation_steps",
    ),
    "clipping": ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "optimizer.max_grad_norm", "gradient_clipping"),
    "stage": ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero.stage", "zero_stage"),
    "optimizer offload": (
        {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
        "zero.offload_optimizer.device",
        "offload_optimizer_device",
    ),
    "parameter offload": (
        {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
        "zero.offload_param.device",
        "offload_param_device",
    ),
    "FSDP": (
        {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"},
        "parallel.engine",
        "FSDP (distributed_type, --use_fsdp)",
    ),
    "CPU": ({"ACCELERATE_USE_CPU": "True"}, "run.device", "use_cpu"),
    "compiling": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "model.compile: set it to true", "dynamo_backend"),
    "another compiler": ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "model.compile", "dynamo_backend"),
    "tensor parallelism": ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallel.tp", "parallelism_config_tp_size"),
    "Megatron-LM": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "", "MEGATRON_LM"),
    "a DeepSpeed JSON": (
        {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
        "--deepspeed_config FILE",
        "deepspeed_config_file",
    ),
    "leaf modules": ({"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Block"}, "", "deepspeed_moe_layer_cls_names"),
}


@pytest.mark.case("A7")
@table(("told", "key", "option"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_differs_is_named_with_variable_key_and_option(told, key, option):
    (error,) = check(DEEPSPEED | told)
    assert isinstance(error, ConfigError)
    assert all(f"{name}={value}" in error.found for name, value in told.items())
    assert key in error.found + error.change and f"take {option}" in error.change


@pytest.mark.case("A7")
def test_a_derived_value_counts_with_its_reason():
    no_bf16 = Machine(2, "cpu", ("fp32",), "this CPU has no bf16 arithmetic")
    (error,) = check({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, no_bf16)
    assert error.found == (
        'ACCELERATE_MIXED_PRECISION=bf16, and precision.dtype is "fp32" (this CPU has no bf16 arithmetic)'
    )


@pytest.mark.case("A7")
def test_deepspeed_mode_on_another_engine_is_one_contradiction_and_not_four():
    (error,) = check(DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, RUN | {"parallel": {"engine": "ddp"}})
    assert 'ACCELERATE_USE_DEEPSPEED=true, and parallel.engine is "ddp"' in error.found


@pytest.mark.case("A7")
def test_the_backend_of_accelerate_is_what_its_mode_is_held_against():
    through = RUN | {"parallel": {"engine": "accelerate"}, "accelerate": {"backend": "deepspeed"}}
    assert check(DEEPSPEED, through) == []
    (error,) = check(DEEPSPEED, through | {"accelerate": {"backend": "ddp"}})
    assert 'accelerate.backend is "ddp"' in error.found and "accelerate.backend: set it to deepspeed" in error.change


FSDP2 = PLAIN | {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
ON_FSDP2 = RUN | {
    "parallel": {"engine": "fsdp2"},
    "fsdp": {
        "reshard_after_forward": False,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_layer_cls_to_wrap": ["Block", "Other"],
    },
}
OPEN = RUN | {"parallel": {"engine": "accelerate"}, "accelerate": {"backend": "fsdp2"}}
AGREES = FSDP2 | {
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Other",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
}


@pytest.mark.case("A7")
@pytest.mark.parametrize(
    ("environ", "config"),
    [
        (FSDP2, ON_FSDP2),
        (AGREES, ON_FSDP2),
        (FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, OPEN),
        (FSDP2 | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, OPEN | {"model": {"compile": True}}),
    ],
    ids=["defaults", "agrees", "open", "compiled"],
)
def test_fsdp2_as_the_json_has_it_is_fine(environ, config):
    assert check(environ, config) == []


FSDP_CONTRADICTIONS = {
    "reshard": ("FSDP_RESHARD_AFTER_FORWARD", "false", "fsdp.reshard_after_forward"),
    "offload": ("FSDP_OFFLOAD_PARAMS", "true", "fsdp.cpu_offload"),
    "no wrapping": ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP", "fsdp.auto_wrap_policy"),
    "classes": ("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block", "fsdp.transformer_layer_cls_to_wrap"),
    "size": ("FSDP_MIN_NUM_PARAMS", "2000", "fsdp.min_num_params"),
    "recomputation": ("FSDP_ACTIVATION_CHECKPOINTING", "true", "model.gradient_checkpointing"),
    "its offload": ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true", ""),
    "prefetch": ("FSDP_FORWARD_PREFETCH", "true", "fsdp.prefetch_depth"),
    "left out modules": ("FSDP_IGNORED_MODULES", "head", ""),
    "copies": ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2", "parallel.dp_replicate"),
    "version 1": ("FSDP_VERSION", "1", "fsdp_version to 2"),
}


@pytest.mark.case("A7")
@table(("name", "told", "key"), FSDP_CONTRADICTIONS.values(), ids=FSDP_CONTRADICTIONS)
def test_what_differs_from_fsdp2_is_named_with_variable_and_key(name, told, key):
    (error,) = check(FSDP2 | {name: told}, OPEN)
    assert f"{name}={told}" in error.found
    assert key in error.found + error.change and "take " in error.change


@pytest.mark.case("A7")
def test_all_contradictions_are_told_together():
    told = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    assert len(check(DEEPSPEED | told)) == 2
