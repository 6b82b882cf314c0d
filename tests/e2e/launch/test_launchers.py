"""The commands that people type, on a tiny checkpoint: all train the same, or say plainly what stands in the way."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer.metrics import read_metrics
from tests.helpers.launch import (
    TRAIN,
    chats,
    deepspeed,
    free_port,
    launch,
    launch_together,
    outside_a_launcher,
    python,
    run_folder,
    write_json,
    write_jsonl,
)
from tests.helpers.tiers import tiers

SET = ("--set", "run.max_steps=1", "--set", "checkpoint.export=false", "--set", "logging.plots=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run: `run.json`, a checkpoint and data."""
    folder = tmp_path_factory.mktemp("run")
    config = run_folder(folder)
    config["data"]["eval"] = write_jsonl(folder / "eval.jsonl", chats(3))
    write_json(folder / "run.json", config)
    return folder


@pytest.fixture(scope="module")
def on_two_ranks(run):
    """What `deepspeed --num_gpus 2` did with it; nothing was compiled before."""
    (run / "extensions").mkdir()
    return deepspeed(TRAIN, "--config", run / "run.json", TORCH_EXTENSIONS_DIR=str(run / "extensions"))


@pytest.fixture(scope="module")
def first_loss(run, on_two_ranks):
    assert on_two_ranks.code == 0, on_two_ranks.text
    return read_metrics(run / "out" / "metrics.jsonl")[0]["loss"]


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


@pytest.mark.case("F11")
def test_deepspeed_on_two_ranks_trains_evaluates_draws_and_exports_without_compiling(run, on_two_ranks):
    assert on_two_ranks.code == 0, on_two_ranks.text
    assert "DeepSpeedEngine, ZeRO stage 2, 2 data rank(s)" in on_two_ranks.text
    seconds = on_two_ranks.when("step 1/3")
    print(f"\nfirst optimizer step {seconds:.1f} s after the deepspeed command")
    assert seconds < 60
    assert list((run / "extensions").iterdir()) == [], "nothing may be compiled for a run without offload"
    lines = read_metrics(run / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert lines[-1]["eval_num_tokens"] > 0
    assert lines[2]["loss"] < lines[0]["loss"]
    for picture in ("loss.png", "training.png"):
        assert (run / "out" / picture).read_bytes().startswith(b"\x89PNG")
    check_exported(run)


def check_exported(run):
    exported = run / "out" / "model"
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    before = AutoModelForCausalLM.from_pretrained(run / "checkpoint").state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (exported, run / "checkpoint"))
    conversation = chats(1)[0]["messages"]
    assert ours.apply_chat_template(conversation) == theirs.apply_chat_template(conversation)


CONFIG_OF_TRAIN = (TRAIN, "--config")
MODULE = ("-m", "ds_trainer", "train")
COMMANDS = {
    "python": ((sys.executable, *CONFIG_OF_TRAIN), 1),
    "ds-trainer": (("ds-trainer", "train"), 1),
    "ds-trainer --nproc": (("ds-trainer", "train", "--nproc", "2"), 2),
    "torchrun": (("torchrun", "--nproc_per_node", "2", "--master_port", "{port}", *MODULE), 2),
    "accelerate": (
        ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "{port}", *MODULE),
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.case("A7")
@pytest.mark.case("F11")
@pytest.mark.parametrize(("command", "ranks"), COMMANDS.values(), ids=COMMANDS)
def test_any_other_way_to_start_takes_the_same_first_step(run, first_loss, tmp_path, command, ranks):
    command = [part.format(port=free_port()) for part in command]
    launched = launch(*command, run / "run.json", *SET, "--set", f"run.output_dir={tmp_path}")
    took_the_same_first_step([launched], first_loss, tmp_path, ranks)


def took_the_same_first_step(launched, first_loss, folder, ranks=2):
    text = "".join(one.text for one in launched)
    assert [one.code for one in launched] == [0] * len(launched), text
    assert text.count("batch: 4 samples per step") == text.count(f"{ranks} data rank(s)") == 1, "said once, by rank 0"
    assert losses(folder) == pytest.approx([first_loss], rel=1e-6)


def slurm(rank, job_id):
    """What srun sets for one of two tasks on one node, in short."""
    task = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_JOB_ID": job_id}
    return {name: str(value) for name, value in task.items()}


def mpirun(rank, port):
    """What Open MPI sets for one of two ranks on one node, and the port that `mpirun -x` hands over."""
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}


@pytest.mark.slow
@pytest.mark.case("F11")
@pytest.mark.parametrize("variables", [slurm, mpirun])
def test_the_bare_variables_of_a_cluster_are_enough(run, first_loss, tmp_path, variables):
    port = free_port()
    environs = [variables(rank, port) for rank in range(2)]
    arguments = ("--config", run / "run.json", *SET, "--set", f"run.output_dir={tmp_path}")
    took_the_same_first_step(launch_together(environs, sys.executable, TRAIN, *arguments), first_loss, tmp_path)


@pytest.mark.slow
def test_a_deepspeed_json_and_set_reach_the_engine(run, first_loss, tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}
    native = write_json(tmp_path / "ds.json", {"csv_monitor": monitor})
    launched = deepspeed(
        TRAIN,
        *("--config", run / "run.json", "--deepspeed", "--deepspeed_config", native),
        *(*SET, "--set", "zero.stage=3", "--set", f"run.output_dir={tmp_path}"),
    )
    assert launched.code == 0, launched.text
    assert "ZeRO stage 3, 2 data rank(s)" in launched.text
    assert list((tmp_path / "monitor").glob("*.csv")), "DeepSpeed's own monitor writes files"
    assert losses(tmp_path) == pytest.approx([first_loss], rel=1e-6)


@pytest.fixture
def busy_port():
    """A port where somebody listens who has never heard of torch, and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.slow
@pytest.mark.case("F11")
def test_a_busy_port_is_named_with_the_option_that_chooses_another(run, busy_port):
    launched = deepspeed(TRAIN, "--config", run / "run.json", port=busy_port)
    refused(launched, f"rank 0 cannot join the process group at 127.0.0.1:{busy_port}", "--master_port")


@pytest.mark.slow
@pytest.mark.case("F11")
def test_a_busy_port_ends_every_rank_where_no_launcher_ends_them(run, busy_port):
    environs = [mpirun(rank, busy_port) for rank in range(2)]
    for rank, launched in enumerate(launch_together(environs, sys.executable, TRAIN, "--config", run / "run.json")):
        refused(launched, f"rank {rank} cannot join the process group at 127.0.0.1:{busy_port}", "MASTER_PORT=N for")
        assert launched.seconds < 60


@pytest.mark.slow
@pytest.mark.case("A7")
def test_what_accelerate_was_told_against_the_json_stops_the_run(run, tmp_path):
    told = tmp_path / "accelerate.yaml"
    told.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: DEEPSPEED, mixed_precision: bf16, num_processes: 2,"
        " num_machines: 1, machine_rank: 0, use_cpu: false,"
        " deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 8}}"
    )
    port = ("--main_process_port", str(free_port()))
    launched = launch("accelerate", "launch", "--config_file", told, *port, *MODULE, run / "run.json", *SET)
    assert launched.code == 1, "accelerate turns 2 into 1"
    for found in (
        f'ACCELERATE_MIXED_PRECISION=bf16, and precision.dtype is "fp32" ({run / "run.json"})',
        f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8, and batch.accumulation is 1 ({run / 'run.json'})",
        f"ACCELERATE_DEEPSPEED_ZERO_STAGE=3, and zero.stage is 2 ({run / 'run.json'})",
    ):
        assert launched.text.count(found) == 1, launched.text
    assert "engine:" not in launched.text


OFFLOAD = ("--set", "zero.offload_optimizer.device=cpu")
NPROC = (Path(sys.executable).parent / "ds-trainer", "train", "--nproc", "2")


@pytest.mark.slow
@pytest.mark.case("E9")
def test_without_a_compiler_all_ranks_end_before_the_model_is_loaded(run, tmp_path):
    launched = launch(
        *NPROC, run / "run.json", *OFFLOAD, PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=str(tmp_path / "ops")
    )
    refused(launched, "no C++ compiler", "g++")
    assert "data.train" not in launched.text


@pytest.mark.slow
@pytest.mark.case("F9")
def test_a_build_killed_with_its_launcher_blocks_no_later_run(run, tmp_path):
    lock, pids = tmp_path / "ops" / "cpu_adam" / "lock", tmp_path / "stand-in.pids"
    hangs = stand_in_compiler(tmp_path, f"echo $$ >> {pids}; exec sleep 600")
    command = (*NPROC, run / "run.json", *OFFLOAD)
    first = subprocess.Popen(list(map(str, command)), env=outside_a_launcher() | hangs, start_new_session=True)
    deadline = time.monotonic() + 100
    while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    for pid in pids.read_text().split():  # ninja gives each compiler a process group of its own.
        os.kill(int(pid), signal.SIGKILL)
    assert lock.exists()
    fails = stand_in_compiler(tmp_path, "exit 1")
    launched = launch(*command, **fails)
    assert f"removed {lock}, left by a process that was killed" in launched.text
    refused(launched, "cpu_adam did not compile", "ds-trainer doctor --build-ops")


def stand_in_compiler(folder, for_the_op):
    """Variables that make a shell line compile the op; the real compiler answers when torch asks for its version."""
    path = folder / "stand-in-c++"
    path.write_text(f'#!/bin/sh\ncase "$*" in *cpu_adam*) {for_the_op};; *) exec c++ "$@";; esac\n')
    path.chmod(0o755)
    return {"CXX": str(path), "TORCH_EXTENSIONS_DIR": str(folder / "ops"), "DS_ACCELERATOR": "cpu"}


@pytest.mark.slow
@pytest.mark.case("F11")
def test_half_of_a_launchers_variables_is_refused_with_the_missing_ones(run):
    launched = python(TRAIN, "--config", run / "run.json", WORLD_SIZE="2")
    refused(launched, "sets WORLD_SIZE=2 but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "deepspeed, torchrun")


FAULTS = {
    "misspelt key": (["--set", "zero.stge=3"], "zero.stge is no key in --set", "did you mean zero.stage?"),
    "no model": (["--set", "model.path=./none"], "model.path is './none'", "set model.path"),
    "no data": (["--set", "data.train=none.jsonl"], "no file none.jsonl", "correct the path in data.train"),
}


@pytest.mark.parametrize("fault", tiers(FAULTS, slow=["no model"]))
def test_under_a_launcher_a_fault_ends_all_ranks_with_one_voice(run, fault):
    arguments, found, change = FAULTS[fault]
    refused(deepspeed(TRAIN, "--config", run / "run.json", *arguments), found, change)


def refused(launched, found, change):
    """Ended by itself, by our exit code, with the three parts said once and without a traceback."""
    assert launched.code == 2, launched.text
    assert launched.text.count("error: ") == 1
    assert launched.text.count("  rule:   ") == launched.text.count("  change: ") == 1
    said = launched.text.partition("error: ")[2]
    assert found in said and change in said
    assert "Traceback" not in launched.text
