"""What accelerate was told, held against the run's JSON."""

import pytest

from ds_trainer.config.io import load_config
from ds_trainer.config.launched import check_launched
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError

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
    return check_launched(environ, resolve(*load_config(config), machine))


@pytest.mark.case("A7")
@pytest.mark.parametrize("environ", [{}, PLAIN, DEEPSPEED, DEEPSPEED | {"ACCELERATE_MIXED_PRECISION": "bf16"}], ids=str)
def test_what_accelerate_says_by_default_or_as_the_json_does_is_fine(environ):
    assert check(environ) == []


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
    "dynamo": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "", "dynamo_backend"),
    "Megatron-LM": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "", "MEGATRON_LM"),
    "a DeepSpeed JSON": (
        {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
        "--deepspeed_config FILE",
        "deepspeed_config_file",
    ),
    "leaf modules": ({"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Block"}, "", "deepspeed_moe_layer_cls_names"),
}


@pytest.mark.case("A7")
@pytest.mark.parametrize(("told", "key", "option"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
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
def test_all_contradictions_are_told_together():
    told = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    assert len(check(DEEPSPEED | told)) == 2
