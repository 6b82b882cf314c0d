"""FSDP2's section, ZeRO's words for it, and what is refused."""

import pytest

from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.config.torch.arguments import fsdp2_arguments
from ds_trainer.errors import ConfigErrors
from tests.helpers.table import table

FSDP2 = {"parallel": {"engine": "fsdp2"}}
GPUS = Machine(8, "cuda", ("fp32", "bf16", "fp16"), "Ampere")
BOTH = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def resolved(machine=GPUS, **sections):
    merged = FSDP2 | {name: FSDP2.get(name, {}) | section for name, section in sections.items()}
    return resolve(*load_config(merged), machine)


def arguments(machine=GPUS, **sections):
    return fsdp2_arguments(resolved(machine, **sections))


@pytest.mark.parametrize(
    "sections, reshard",
    [
        ({}, True),
        ({"zero": {"stage": 3}}, True),
        ({"zero": {"stage": 2}}, False),
        ({"zero": {"stage": 3, "zero_hpz_partition_size": 4}}, 4),
        ({"fsdp": {"reshard_after_forward": False}}, False),
        ({"fsdp": {"reshard_after_forward": 2}}, 2),
        ({"fsdp": {"reshard_after_forward": 2}, "zero": {"stage": 3}}, 2),
    ],
)
def test_zero_stages_are_values_of_reshard_after_forward(sections, reshard):
    assert arguments(**sections).reshard_after_forward is reshard


def test_the_reason_names_the_key_that_decided():
    run = resolved(zero={"stage": 2})
    assert run.reasons["fsdp.reshard_after_forward"] == "zero.stage 2"


def test_masters_and_reduction_are_fp32_by_default():
    got = arguments(precision={"dtype": "bf16"})
    assert (got.param_dtype, got.reduce_dtype, got.buffer_dtype) == ("bf16", "fp32", None)
    assert arguments(precision={"dtype": "fp32"}).param_dtype is None
    assert arguments(precision={"dtype": "bf16", "grad_dtype": "bf16"}).reduce_dtype == "bf16"
    assert arguments(precision={"dtype": "bf16", "communication_data_type": "bf16"}).reduce_dtype == "bf16"


def test_ranks_are_copies_times_cuts():
    assert arguments().mesh == {"dp_shard": 8}
    assert arguments(parallel={"engine": "fsdp2", "dp_replicate": 2}).mesh == {"dp_replicate": 2, "dp_shard": 4}


def test_offload_is_zeros_two_offloads_together_and_pins_memory_with_a_gpu_only():
    assert (arguments(zero=BOTH).cpu_offload, arguments(zero=BOTH).pin_memory) == (True, True)
    on_cpu = arguments(Machine(2, "cpu"), fsdp={"cpu_offload": True})
    assert (on_cpu.cpu_offload, on_cpu.pin_memory) == (True, False)
    assert not arguments().cpu_offload


@table(
    "sections, keys",
    [
        ({"zero": {"stage": 1}}, ["zero.stage to 2 or 3"]),
        ({"zero": {"stage": 0}}, ["parallel.engine to ddp"]),
        ({"zero": {"stage": 3}, "fsdp": {"reshard_after_forward": False}}, ["remove one"]),
        ({"zero": {"offload_param": {"device": "cpu"}}}, ["set both to cpu"]),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, ["fsdp.cpu_offload"]),
        ({"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}, ["to cpu", "nvme_path"]),
        ({"zero": BOTH, "fsdp": {"cpu_offload": False}}, ["remove fsdp.cpu_offload"]),
        ({"zero": {"stage": 3, "zero_quantized_weights": True}}, ["remove zero.zero_quantized_weights"]),
        ({"fsdp": {"pin_memory": True}}, ["fsdp.cpu_offload"]),
        ({"fsdp": {"min_num_params": 5, "auto_wrap_policy": "no_wrap"}}, ["size_based_wrap"]),
        ({"fsdp": {"min_num_params": 5, "transformer_layer_cls_to_wrap": ["Block"]}}, ["remove one"]),
        ({"fsdp": {"cpu_offload": True}, "zero": {"offload_param": {"device": "none"}}}, ["remove fsdp.cpu_offload"]),
        ({"fsdp": {"auto_wrap_policy": "no_wrap", "prefetch_depth": 2}}, ["remove one"]),
        ({"precision": {"dtype": "bf16", "grad_dtype": "bf16", "communication_data_type": "fp32"}}, ["same dtype"]),
        ({"optimizer": {"name": "adafactor"}}, ["parallel.engine to ddp"]),
        ({"optimizer": {"name": "lion", "fused": True}}, ["optimizer.fused"]),
        ({"ddp": {"static_graph": True}}, ["remove ddp.static_graph"]),
    ],
)
def test_what_fsdp2_cannot_do_is_refused_before_a_machine_is_known(sections, keys):
    with pytest.raises(ConfigErrors) as caught:
        load_config(FSDP2 | sections)
    changes = [error.change for error in caught.value.errors]
    assert all(any(key in change for change in changes) for key in keys)


@pytest.mark.parametrize(
    "sections, change",
    [
        ({"parallel": {"engine": "fsdp2", "dp_replicate": 3}}, "1, 2, 4, 8"),
        ({"parallel": {"engine": "fsdp2", "dp_replicate": 2, "dp_shard": 2}}, "remove parallel.dp_shard"),
        ({"fsdp": {"reshard_after_forward": 3}}, "reshard_after_forward to 2 or 4"),
        ({"fsdp": {"reshard_after_forward": 8}}, "reshard_after_forward to 2 or 4"),
        ({"zero": {"stage": 3, "zero_hpz_partition_size": 3}}, "zero_hpz_partition_size to 2 or 4"),
    ],
)
def test_a_layout_that_the_ranks_do_not_allow_names_those_that_work(sections, change):
    with pytest.raises(ConfigErrors) as caught:
        resolved(**sections)
    assert any(change in error.change for error in caught.value.errors)


@pytest.mark.parametrize(
    "key, value, policy",
    [
        ("min_num_params", 5, "size_based_wrap"),
        ("transformer_layer_cls_to_wrap", ["Block"], "transformer_based_wrap"),
    ],
)
def test_a_key_of_a_policy_chooses_it(key, value, policy):
    assert resolved(fsdp={key: value}).config.fsdp.auto_wrap_policy == policy


def test_buckets_have_no_effect_and_are_warned_of():
    run = resolved(zero={"stage": 3, "reduce_bucket_size": 1000})
    assert any(text.startswith("zero.reduce_bucket_size has no effect") for text in run.warnings)


@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
@pytest.mark.parametrize("parallel", [{"dp_replicate": 2}, {"dp_shard": 4}])
def test_only_fsdp2_lays_out_copies(engine, parallel):
    with pytest.raises(ConfigErrors, match="lays out the data-parallel ranks of fsdp2"):
        load_config({"parallel": {"engine": engine, **parallel}})


def test_accelerate_runs_on_what_its_section_says():
    run = resolve(*load_config({"parallel": {"engine": "accelerate"}, "zero": {"stage": 3}}), GPUS)
    assert run.config.accelerate.backend == "deepspeed"
    with pytest.raises(ConfigErrors, match=r"prefetch_depth"):
        sections = {"accelerate": {"backend": "fsdp2"}, "fsdp": {"prefetch_depth": 2}}
        load_config({"parallel": {"engine": "accelerate"}} | sections)
    with pytest.raises(ConfigErrors, match="true or false"):
        sections = {"accelerate": {"backend": "fsdp2"}, "fsdp": {"reshard_after_forward": 2}}
        load_config({"parallel": {"engine": "accelerate"}} | sections)
