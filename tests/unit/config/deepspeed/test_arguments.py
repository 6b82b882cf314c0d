"""The native JSON says what the unified config says, and the raw block cannot contradict it."""

import pytest

from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigErrors
from tests.helpers.deepspeed_reads import accept

CPU = Machine(2, "cpu", ("fp32",), "no bf16")
GPU = Machine(2, "cuda", ("fp32", "bf16", "fp16"), "Ampere")


def native(raw, machine=CPU, standalone=False):
    return to_deepspeed(resolve(*load_config(raw), machine), standalone)


def faults(block, raw=None):
    with pytest.raises(ConfigErrors) as caught:
        native({**(raw or {}), "native": {"deepspeed": block}})
    return caught.value.errors


def test_batch_and_clipping_are_translated():
    result = native({"batch": {"micro_size": 3, "accumulation": 4}, "optimizer": {"max_grad_norm": 0.25}})
    assert result["train_batch_size"] == 24
    assert result["train_micro_batch_size_per_gpu"] == 3
    assert result["gradient_accumulation_steps"] == 4
    assert result["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    "stage, present, absent",
    [
        (0, set(), {"reduce_bucket_size", "overlap_comm"}),
        (1, {"reduce_bucket_size", "allgather_bucket_size"}, {"sub_group_size"}),
        (2, {"reduce_bucket_size", "allgather_bucket_size", "overlap_comm"}, {"stage3_max_live_parameters"}),
        (3, {"sub_group_size", "stage3_prefetch_bucket_size"}, {"allgather_bucket_size", "round_robin_gradients"}),
    ],
)
def test_only_the_keys_of_the_stage_are_written(stage, present, absent):
    section = native({"zero": {"stage": stage}})["zero_optimization"]
    assert section["stage"] == stage
    assert present <= set(section) and not absent & set(section)


@pytest.mark.parametrize(
    "stage, dtype, sections",
    [
        (0, "fp32", set()),
        (0, "bf16", {"torch_autocast"}),
        (0, "fp16", {"fp16"}),
        (1, "bf16", {"bf16"}),
        (3, "bf16", {"bf16"}),
        (2, "fp16", {"fp16"}),
        (3, "fp32", set()),
    ],
)
def test_a_format_has_one_section(stage, dtype, sections):
    result = native({"zero": {"stage": stage}, "precision": {"dtype": dtype}}, GPU)
    assert {"bf16", "fp16", "torch_autocast"} & set(result) == sections
    assert result["data_types"]["grad_accum_dtype"] == ("fp16" if (stage, dtype) == (0, "fp16") else "fp32")


def test_offload_carries_its_own_keys_only_and_file_io_comes_with_nvme():
    nvme = {"device": "nvme", "nvme_path": "/n"}
    cpu = native({"zero": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
    assert cpu["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 1.0}
    assert "aio" not in cpu and cpu["zero_force_ds_cpu_optimizer"] is True
    both = native({"zero": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "aio": {"queue_depth": 3}}})
    assert both["aio"]["queue_depth"] == 3
    assert both["zero_optimization"]["offload_param"]["nvme_path"] == "/n"
    assert "ratio" not in both["zero_optimization"]["offload_optimizer"]


def test_an_optimizer_that_deepspeed_lacks_on_the_host_is_let_through():
    raw = {"optimizer": {"name": "sgd"}, "zero": {"offload_optimizer": {"device": "cpu"}}}
    assert native(raw)["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.case("A6")
@pytest.mark.parametrize(
    "key, meant",
    [
        ("zero_optimisation", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("stage3_gather_16bit_weights_on_model_save", "checkpoint.export"),
        ("sub_group_size", "belongs inside zero_optimization; set zero.sub_group_size"),
    ],
)
def test_a_top_level_key_that_deepspeed_never_reads_is_refused_with_the_one_that_was_meant(key, meant):
    (error,) = faults({key: 1})
    assert key in error.found and meant in error.change


@pytest.mark.case("A6")
@pytest.mark.parametrize("section", ["zero_optimization", "aio", "data_types", "torch_autocast", "bf16", "fp16"])
def test_an_unknown_key_in_a_native_section_is_refused(section):
    (error,) = faults({section: {"no_such_key": 1}})
    assert f"{section}.no_such_key" in error.found


@pytest.mark.case("A6")
@pytest.mark.parametrize(
    "key", ["optimizer", "scheduler", "activation_checkpointing", "dataloader_drop_last", "compile"]
)
def test_a_native_key_without_effect_here_is_refused(key):
    (error,) = faults({key: {}})
    assert error.found == f"native.deepspeed.{key} is set"


@pytest.mark.case("A1")
@pytest.mark.parametrize(
    "block, unified",
    [
        ({"train_batch_size": 4096}, "batch.global_size"),
        ({"gradient_clipping": 0.5}, "optimizer.max_grad_norm"),
        ({"zero_optimization": {"stage": 3}}, "zero.stage"),
        ({"bf16": {"enabled": True}}, "precision.dtype"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero.offload_optimizer.device"),
        ({"zero_optimization": {"prefetch_bucket_size": 5}}, "zero.stage3_prefetch_bucket_size"),
    ],
)
def test_a_native_key_that_contradicts_names_the_unified_key(block, unified):
    (error,) = faults(block)
    assert unified in error.found and f"set {unified}" in error.change


def test_auto_is_refused_with_the_key_it_follows():
    (error,) = faults({"train_batch_size": "auto"})
    assert '"auto"' in error.found and "batch.global_size" in error.change


def test_a_native_key_that_agrees_or_has_no_unified_key_is_merged():
    block = {
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "steps_per_print": 10,
        "comms_logger": {"enabled": True},
    }
    result = native({"native": {"deepspeed": block}})
    assert result["comms_logger"] == {"enabled": True} and result["steps_per_print"] == 10
    assert "fp16" not in result


def test_a_native_key_joins_a_section_that_we_write():
    block = {"zero_optimization": {"ignore_unused_parameters": False}}
    section = native({"native": {"deepspeed": block}})["zero_optimization"]
    assert section["ignore_unused_parameters"] is False and section["stage"] == 2


@pytest.mark.parametrize(
    "schedule, kind", [("constant", "WarmupLR"), ("linear", "WarmupDecayLR"), ("cosine", "WarmupCosineLR")]
)
def test_a_standalone_file_names_optimizer_and_schedule(schedule, kind):
    raw = {"schedule": {"name": schedule, "warmup_steps": 2}, "run": {"max_steps": 10}, "optimizer": {"name": "adam"}}
    result = native(raw, standalone=True)
    assert result["optimizer"]["type"] == "Adam" and result["optimizer"]["params"]["adam_w_mode"] is False
    assert result["scheduler"]["type"] == kind and result["scheduler"]["params"]["warmup_num_steps"] == 2
    accept(result, world=2)


@pytest.mark.parametrize("raw", [{"schedule": {"name": "wsd"}, "run": {"max_steps": 9}}, {"run": {"epochs": 1}}])
def test_a_standalone_file_that_deepspeed_cannot_express_is_refused(raw):
    with pytest.raises(ConfigErrors):
        native(raw, standalone=True)
