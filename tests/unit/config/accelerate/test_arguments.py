"""A run in accelerate's words, read by accelerate itself."""

from __future__ import annotations

import os

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy

from ds_trainer.config.accelerate.arguments import to_accelerate_yaml
from ds_trainer.config.accelerate.launcher_conflicts import check_accelerate_launch
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.config.torch.arguments import ddp_arguments, fsdp2_arguments
from ds_trainer.errors import ConfigErrors
from ds_trainer.interop.accelerate.notes import accelerate_notes
from ds_trainer.interop.accelerate.snippet import accelerate_snippet

GPUS = Machine(4, "cuda", ("fp32", "bf16", "fp16"), "computes in bf16")
BATCH = {"batch": {"accumulation": 3, "micro_size": 2}, "optimizer": {"max_grad_norm": 0.5}}
WRAP = {"auto_wrap_policy": "transformer_based_wrap", "transformer_layer_cls_to_wrap": ["Block", "Other"]}


def through(backend, **sections):
    return BATCH | {"parallel": {"engine": "accelerate"}, "accelerate": {"backend": backend}} | sections


RUNS = {
    "zero2": BATCH | {"zero": {"stage": 2}},
    "zero3": through("deepspeed", zero={"stage": 3, "offload_optimizer": {"device": "cpu"}}),
    "ddp": BATCH | {"parallel": {"engine": "ddp"}},
    "ddp-fp16": through("ddp", precision={"dtype": "fp16"}, ddp={"comm_hook": "powersgd", "powersgd_rank": 2}),
    "fsdp2": BATCH | {"parallel": {"engine": "fsdp2"}},
    "fsdp2-blocks": through("fsdp2", fsdp=WRAP | {"reshard_after_forward": False}),
    "fsdp2-offload": through("fsdp2", fsdp={"cpu_offload": True, "pin_memory": False}, precision={"dtype": "fp32"}),
    "fsdp2-size": through("fsdp2", fsdp={"auto_wrap_policy": "size_based_wrap", "min_num_params": 5000}),
    "fsdp2-fp16": through("fsdp2", precision={"dtype": "fp16"}, model={"gradient_checkpointing": True}),
    "hsdp": through("fsdp2", model={"compile": True}) | {"parallel": {"engine": "accelerate", "dp_replicate": 2}},
}


def run(name, machine=GPUS):
    return resolve(*load_config(RUNS[name]), machine)


@pytest.fixture(autouse=True)
def _as_before():
    """What accelerate leaves in the process: variables, and its one state."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)


def launched(file):
    """The variables that `accelerate launch --config_file` gives a rank."""
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    args.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)


@pytest.mark.case("A7")
@pytest.mark.parametrize("name", RUNS)
def test_the_file_is_read_by_accelerate_and_what_it_sends_agrees_with_the_run(tmp_path, name):
    resolved, file = run(name), tmp_path / "accelerate.yaml"
    content = to_accelerate_yaml(resolved)
    file.write_text(yaml.safe_dump(content))
    read = load_config_from_file(str(file))
    assert read.num_processes == 4
    kinds = {"zero": "DEEPSPEED", "fsdp": "FSDP", "hsdp": "FSDP", "ddp": "MULTI_GPU", "ddp-": "MULTI_GPU"}
    assert read.distributed_type == kinds[name[:4]]
    environ = launched(file)
    assert check_accelerate_launch(environ, resolved) == []
    if read.distributed_type == "FSDP":
        assert environ["FSDP_VERSION"] == "2"
        (error,) = check_accelerate_launch(environ | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, resolved)
        assert "FSDP_AUTO_WRAP_POLICY=NO_WRAP" in error.found
    if name == "zero3":
        assert environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert environ["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
        assert environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
    if name == "hsdp":
        assert environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"
        assert environ["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"


def made(resolved):
    """The arguments, plugin objects among them, that the snippet hands to `Accelerator`."""
    space: dict = {}
    exec(accelerate_snippet(resolved), space)
    space["Accelerator"] = dict
    return space["make_accelerator"]()


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("fsdp2", "hsdp"))])
def test_the_fsdp_plugin_of_the_snippet_is_told_what_fully_shard_is(name):
    resolved = run(name)
    given, wanted, fsdp = made(resolved), fsdp2_arguments(resolved), resolved.config.fsdp
    plugin = given["fsdp_plugin"]
    policy = plugin.mixed_precision_policy
    formats = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is wanted.reshard_after_forward
    assert policy.param_dtype == formats[wanted.param_dtype]
    assert policy.reduce_dtype == formats[wanted.reduce_dtype] == torch.float32
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is wanted.cpu_offload
    assert not wanted.cpu_offload or plugin.cpu_offload.pin_memory is wanted.pin_memory
    by_size = fsdp.auto_wrap_policy == "size_based_wrap"
    assert plugin.auto_wrap_policy.__name__ == f"{'size_based' if by_size else 'transformer'}_auto_wrap_policy"
    assert plugin.min_num_params == (fsdp.min_num_params if by_size else None)
    named = fsdp.transformer_layer_cls_to_wrap
    assert plugin.transformer_cls_names_to_wrap == (list(named) if named else None)
    sizes = given.get("parallelism_config")
    got = (
        {"dp_shard": 4} if sizes is None else {"dp_replicate": sizes.dp_replicate_size, "dp_shard": sizes.dp_shard_size}
    )
    assert got == wanted.mesh
    assert given["mixed_precision"] == {"fp32": "no"}.get(
        resolved.config.precision.dtype, resolved.config.precision.dtype
    )


def test_the_deepspeed_plugin_of_the_snippet_holds_the_native_json_and_gathers_what_it_saves():
    resolved = run("zero3")
    given = made(resolved)
    got = given["deepspeed_plugin"].deepspeed_config
    wanted = {key: item for key, item in to_deepspeed(resolved).items() if key != "steps_per_print"}
    wanted["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    assert {key: got[key] for key in wanted} == wanted
    assert given["gradient_accumulation_steps"] == 3


def test_the_handlers_of_the_snippet_hold_the_arguments_of_ddp_and_of_the_loss_scale():
    resolved = run("ddp-fp16")
    ddp, scaler = made(resolved)["kwargs_handlers"]
    assert {key: getattr(ddp, key) for key in ddp_arguments(resolved)} == ddp_arguments(resolved)
    assert ddp.comm_hook is DDPCommunicationHookType.POWER_SGD, "a string would be ignored"
    assert ddp.comm_state_option["matrix_approximation_rank"] == 2
    assert (scaler.init_scale, scaler.growth_interval) == (65536.0, 1000)


def test_the_snippet_runs_with_accelerate():
    space: dict = {}
    exec(accelerate_snippet(run("ddp", Machine(1))), space)
    accelerator = space["make_accelerator"]()
    assert isinstance(accelerator, Accelerator)
    assert accelerator.gradient_accumulation_steps == 3
    model, _ = accelerator.prepare(layer := torch.nn.Linear(2, 2), torch.optim.SGD(layer.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert layer.bias.grad.tolist() == pytest.approx([1 / 3, 1 / 3])


def test_what_accelerate_cannot_say_is_noted_with_its_key():
    keys = {
        "loss.chunk_tokens": {"loss": {"chunk_tokens": 64}},
        "fsdp.buffer_dtype bf16": {"fsdp": {"buffer_dtype": "bf16"}},
        "fsdp.prefetch_depth 2": {"fsdp": {"prefetch_depth": 2}},
        "fsdp.reshard_after_forward 2": {"fsdp": {"reshard_after_forward": 2}},
        "fsdp.pin_memory false": {"fsdp": {"cpu_offload": True, "pin_memory": False}},
        "model.gradient_checkpointing selective": {"model": {"gradient_checkpointing": "selective"}},
        "optimizer.max_grad_norm 0.5 (l2)": {},
        "precision.communication_data_type": {"precision": {"dtype": "bf16"}},
        "batch.accumulation 3": {},
    }
    for key, sections in keys.items():
        config = BATCH | {"parallel": {"engine": "fsdp2"}} | sections
        notes = accelerate_notes(resolve(*load_config(config), GPUS))
        assert [note for note in notes if note.startswith(key)], (key, notes)


def test_accelerate_on_fsdp2_is_refused_on_a_cpu():
    with pytest.raises(
        ConfigErrors, match=r"accelerate.backend is \"fsdp2\".* on cpu\n.*GPUs only.*\n.*engine to fsdp2"
    ):
        run("fsdp2-blocks", Machine(4))


def test_the_file_lets_one_rank_of_a_machine_load_and_accelerate_takes_it_so(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(to_accelerate_yaml(run("fsdp2"))))
    environ = launched(file)
    assert environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == environ["FSDP_SYNC_MODULE_STATES"] == "true"
    os.environ.update(environ)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.cpu_ram_efficient_loading and plugin.sync_module_states is None


@pytest.mark.parametrize("name", ["zero2", "ddp", "fsdp2"])
def test_where_the_ranks_are_is_noted_as_the_launchers(name):
    (note,) = [note for note in accelerate_notes(run(name)) if "num_machines" in note]
    assert note.startswith("num_processes 4") and "main_process_ip" in note
    alone = Machine(1, "cuda", ("fp32", "bf16", "fp16"), "computes in bf16")
    assert not [note for note in accelerate_notes(run(name, alone)) if "num_machines" in note]


def test_the_snippet_says_why_accelerate_is_told_no_mixed_precision_under_deepspeed():
    resolved = run("zero2")
    assert made(resolved)["mixed_precision"] == "no" and resolved.config.precision.dtype == "bf16"
    assert "# mixed_precision is 'no' because DEEPSPEED itself says bf16\n" in accelerate_snippet(resolved)
