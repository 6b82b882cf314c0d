"""Every open value is derived, with its reason, from the numbers given, the machine and the model."""

import pytest

from ds_trainer.config.io import load_config
from ds_trainer.config.machine import cpu_machine
from ds_trainer.config.resolve import resolve, total_steps
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.planning.checkpoint_spec import ModelSpec
from tests.helpers.table import table

CPU = Machine(2, "cpu", ("fp32",), "no bf16 here")
GPU = Machine(8, "cuda", ("fp32", "bf16", "fp16"), "Ampere")


def resolved(raw, machine=CPU, overrides=(), **model):
    return resolve(*load_config(raw, overrides), machine, **model)


@pytest.mark.case("A3")
@table(
    "given, ranks, solved",
    [
        ({"micro_size": 4, "accumulation": 8}, 2, (64, 4, 8)),
        ({"global_size": 64, "micro_size": 4}, 2, (64, 4, 8)),
        ({"global_size": 64, "accumulation": 8}, 2, (64, 4, 8)),
        ({"global_size": 64, "micro_size": 4, "accumulation": 8}, 2, (64, 4, 8)),
        ({"global_size": 64}, 2, (64, 1, 32)),
        ({"micro_size": 4}, 2, (8, 4, 1)),
        ({"accumulation": 4}, 2, (8, 1, 4)),
        ({}, 2, (2, 1, 1)),
    ],
)
def test_any_numbers_that_determine_the_rest_suffice(given, ranks, solved):
    result = resolved({"batch": given}, Machine(ranks))
    batch = result.config.batch
    assert (batch.global_size, batch.micro_size, batch.accumulation) == solved
    derived = {"global_size", "micro_size", "accumulation"} - set(given)
    assert all(result.reasons[f"batch.{key}"] not in ("default", "config") for key in derived)
    assert all(result.reasons[f"batch.{key}"] == "config" for key in given)


@pytest.mark.case("A3")
@pytest.mark.parametrize(
    "given, ranks, numbers, nearest",
    [
        (
            {"global_size": 256, "micro_size": 4, "accumulation": 8},
            1,
            ("256", "4", "8", "1 data-parallel ranks", "32"),
            "set batch.global_size to 32 or batch.accumulation to 64 or batch.micro_size to 32",
        ),
        (
            {"global_size": 7, "micro_size": 2},
            2,
            ("7", "2", "2 data-parallel ranks", "4"),
            "set batch.global_size to 4 or 8",
        ),
        (
            {"global_size": 12, "micro_size": 4},
            2,
            ("12", "4", "2 data-parallel ranks", "8"),
            "set batch.global_size to 8 or 16 or batch.micro_size to 3",
        ),
        ({"global_size": 3}, 4, ("3", "4 data-parallel ranks"), "set batch.global_size to 4"),
    ],
)
def test_numbers_that_contradict_are_all_named_with_the_nearest_that_work(given, ranks, numbers, nearest):
    with pytest.raises(ConfigErrors) as caught:
        resolved({"batch": given}, Machine(ranks))
    (error,) = caught.value.errors
    assert all(number in error.found for number in numbers)
    assert error.change == nearest


@pytest.mark.case("A9")
@pytest.mark.parametrize(
    "samples, global_size, epochs, max_steps, steps",
    [(10, 16, 3, None, 3), (10, 4, 3, None, 9), (64, 8, 1, None, 8), (10, 4, 3, 5, 5), (None, 4, None, 7, 7)],
)
def test_steps_count_the_short_window_of_every_epoch(samples, global_size, epochs, max_steps, steps):
    assert total_steps(samples, global_size, epochs, max_steps) == steps


@pytest.mark.case("A9")
def test_data_without_a_length_needs_max_steps():
    with pytest.raises(ConfigError, match=r"run\.max_steps"):
        total_steps(None, 4, 1, None)


def test_precision_follows_what_the_device_computes_and_says_so():
    slow, fast = resolved({}, CPU), resolved({}, GPU)
    assert (slow.config.precision.dtype, slow.reasons["precision.dtype"]) == ("fp32", "no bf16 here")
    assert (fast.config.precision.dtype, fast.reasons["precision.dtype"]) == ("bf16", "Ampere")
    assert fast.config.precision.grad_dtype == fast.config.precision.communication_data_type == "fp32"


def test_an_explicit_slow_precision_warns_and_runs():
    result = resolved({"precision": {"dtype": "bf16"}}, CPU)
    assert result.config.precision.dtype == "bf16"
    assert any("bf16 is slow here: no bf16 here" in text for text in result.warnings)
    assert not resolved({"precision": {"dtype": "bf16"}}, GPU).warnings


@pytest.mark.parametrize(
    "flags, native", [({"avx2"}, ("fp32",)), ({"avx512_bf16"}, ("fp32", "bf16")), ({"amx_bf16"}, ("fp32", "bf16"))]
)
def test_a_cpu_computes_bf16_where_its_flags_say_so(flags, native):
    assert cpu_machine(1, frozenset(flags)).native_dtypes == native


@pytest.mark.case("A5")
def test_buckets_are_clamped_to_the_model_also_when_they_were_set():
    raw = {"zero": {"stage": 2, "allgather_bucket_size": 500_000_000}}
    result = resolved(raw, num_parameters=1001)
    assert result.config.zero.reduce_bucket_size == 1001
    assert result.config.zero.allgather_bucket_size == 1002, "DeepSpeed wants it even"
    assert "config says 500000000" in result.reasons["zero.allgather_bucket_size"]
    assert "1001 elements" in result.reasons["zero.reduce_bucket_size"]


@pytest.mark.case("A5")
def test_a_bucket_below_the_models_size_stays_as_it_was_set():
    result = resolved({"zero": {"reduce_bucket_size": 500}}, num_parameters=1000)
    assert result.config.zero.reduce_bucket_size == 500
    assert result.reasons["zero.reduce_bucket_size"] == "config"


@pytest.mark.case("A5")
def test_an_unknown_model_falls_back_on_constants_and_says_so():
    result = resolved({"zero": {"stage": 3}})
    zero = result.config.zero
    assert (zero.reduce_bucket_size, zero.stage3_param_persistence_threshold) == (500_000_000, 100_000)
    assert "not known" in result.reasons["zero.reduce_bucket_size"]
    assert "not known" in result.reasons["zero.stage3_param_persistence_threshold"]


@pytest.mark.case("A5")
def test_the_persistence_threshold_follows_the_hidden_size():
    spec = ModelSpec("", "llama", hidden_size=64, vocab_size=10, max_positions=8, tied=True)
    assert resolved({"zero": {"stage": 3}}, spec=spec).config.zero.stage3_param_persistence_threshold == 640


def test_swapped_parameters_get_buffers_of_their_largest_shard_and_leave_host_memory():
    part = {"device": "nvme", "nvme_path": "/n"}
    result = resolved({"zero": {"stage": 3, "offload_param": part}}, num_parameters=100, largest_parameter=7)
    assert result.config.zero.offload_param.buffer_size == 4
    assert result.config.zero.offload_param.max_in_cpu == 0
    assert result.config.zero.offload_param.pin_memory is False


@pytest.mark.case("E6")
def test_a_swap_buffer_smaller_than_the_largest_shard_is_refused():
    def run(elements):
        part = {"device": "nvme", "nvme_path": "/n", "buffer_size": elements}
        return resolved({"zero": {"stage": 3, "offload_param": part}}, num_parameters=100, largest_parameter=7)

    assert run(4).config.zero.offload_param.buffer_size == 4
    with pytest.raises(ConfigErrors, match="largest parameter has 7 elements") as error:
        run(3)
    assert "set it to 4 or more" in str(error.value)


def test_host_memory_is_pinned_with_a_gpu_only():
    raw = {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for machine, expected in ((CPU, False), (GPU, True)):
        zero = resolved(raw, machine).config.zero
        assert zero.offload_optimizer.pin_memory is expected


@pytest.mark.parametrize(
    "raw, machine, implementation",
    [
        ({}, GPU, "torch_fused"),
        ({}, CPU, "torch_fused"),
        ({"optimizer": {"name": "lion"}}, GPU, "torch"),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, GPU, "deepspeed_cpu"),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": {"name": "sgd"}}, GPU, "torch"),
        ({"parallel": {"engine": "ddp"}}, GPU, "torch_fused"),
    ],
)
def test_the_optimizer_is_chosen_by_where_its_state_lives(raw, machine, implementation):
    assert resolved(raw, machine).optimizer_implementation == implementation


def test_lengths_are_derived_from_what_bounds_the_run():
    assert resolved({}).config.run.epochs == 1
    assert resolved({"run": {"max_steps": 5}}).config.run.epochs is None
    assert resolved({}).config.schedule.warmup_steps == 0
    assert resolved({"schedule": {"warmup_ratio": 0.1}}).config.schedule.warmup_steps is None
    assert resolved({"batch": {"micro_size": 3}}).config.evaluation.batch_size == 3


def test_fp16_at_stage_0_accumulates_as_deepspeed_does():
    raw = {"precision": {"dtype": "fp16"}, "zero": {"stage": 0}}
    assert resolved(raw, GPU).config.precision.grad_dtype == "fp16"
    raw["parallel"], raw["zero"] = {"engine": "ddp"}, {}
    assert resolved(raw, GPU).config.precision.grad_dtype == "fp32"


def test_faults_of_batch_and_machine_are_reported_together():
    with pytest.raises(ConfigErrors) as caught:
        resolved({"precision": {"dtype": "fp16"}, "batch": {"global_size": 7}})
    assert len(caught.value.errors) == 2


def test_samples_longer_than_the_models_positions_are_refused_where_the_model_is_known():
    spec = ModelSpec("", "llama", hidden_size=64, vocab_size=10, max_positions=8, tied=True)
    with pytest.raises(ConfigErrors, match=r"data\.max_length is 9 \(config\), the model has 8 positions"):
        resolved({"data": {"max_length": 9}}, spec=spec)
    assert resolved({"data": {"max_length": 8}}, spec=spec).config.data.max_length == 8


@pytest.mark.case("G7")
@pytest.mark.parametrize(("stage", "device", "expected"), [(2, "cuda", False), (3, "cuda", True), (3, "cpu", False)])
def test_overlap_is_on_only_where_deepspeed_has_it_on(stage, device, expected):
    config, origins = load_config({"zero": {"stage": stage}, "batch": {"micro_size": 1}})
    machine = Machine(2, device, ("fp32", "bf16"), "")
    assert resolve(config, origins, machine).config.zero.overlap_comm is expected
