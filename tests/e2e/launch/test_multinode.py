"""The example files for several nodes: well-formed, and run with their variables set for one node of two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deepspeed.launcher.runner import fetch_hostfile

from ds_trainer.metrics import read_metrics
from tests.helpers.launch import ROOT, free_port, launch, run_folder, write_json

FOLDER = ROOT / "examples" / "multinode"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
JOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]

SRUN = """#!/bin/bash
# Starts two tasks on this machine with the variables of srun, and ends with the highest of their codes.
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; first=$?
wait $!; second=$?
exit $((first > second ? first : second))
"""


@pytest.fixture
def run(tmp_path):
    """A tiny run of one step; `run.json` is its file."""
    config = run_folder(tmp_path)
    config["run"]["max_steps"] = 1
    config["logging"], config["checkpoint"] = {"plots": False}, {"export": False}
    write_json(tmp_path / "run.json", config)
    return tmp_path


def trained(launched, run):
    assert launched.code == 0, launched.text
    assert launched.text.count("2 data rank(s)") == 1
    assert [line["step"] for line in read_metrics(run / "out" / "metrics.jsonl")] == [1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_correct_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_deepspeed_reads_the_hostfile():
    assert dict(fetch_hostfile(FOLDER / "hostfile")) == {"node1": 8, "node2": 8}


def test_every_file_is_in_the_table_of_the_readme():
    text = (FOLDER / "README.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if path.name not in text] == ["README.md"]


def test_the_pods_of_the_kubernetes_job_are_alike():
    assert set(REPLICAS) == {"Master", "Worker"}
    assert REPLICAS["Master"]["replicas"] == 1
    assert REPLICAS["Master"]["template"] == REPLICAS["Worker"]["template"]
    (container,) = REPLICAS["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(JOB["spec"]["nprocPerNode"])
    volumes = {volume["name"] for volume in REPLICAS["Master"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def directives():
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))


@pytest.mark.case("F10")
def test_the_slurm_job_is_warned_before_its_time_is_up_and_goes_back_into_the_queue():
    asked = directives()
    assert asked["signal"] == "USR1@120" and "requeue" in asked
    assert asked["gpus-per-node"] == asked["ntasks-per-node"], "one GPU a rank"


@pytest.mark.full
@pytest.mark.case("F11")
def test_the_deepspeed_script_runs(run):
    hostfile = run / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    node = {"HOSTFILE": str(hostfile), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    trained(launch("bash", FOLDER / "deepspeed.sh", run / "run.json", **node), run)


@pytest.mark.full
@pytest.mark.case("F11")
def test_the_torchrun_script_runs(run):
    node = {"NNODES": "1", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    trained(launch("bash", FOLDER / "torchrun.sh", run / "run.json", **node), run)


@pytest.mark.slow
@pytest.mark.case("F11")
def test_the_kubernetes_job_runs(run):
    (container,) = REPLICAS["Master"]["template"]["spec"]["containers"]
    command = [
        part.replace("/run/run.json", str(run / "run.json")) for part in container["command"] + container["args"]
    ]
    told = {"NNODES": 1, "NPROC_PER_NODE": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    trained(launch(*command, **{f"PET_{name}": str(value) for name, value in told.items()}), run)


def batch(run, *arguments, **command):
    """Runs the script as sbatch does, once, with the variables of a batch step; srun and scontrol are stand-ins."""
    tools = run / "tools"
    tools.mkdir()
    scontrol = f'#!/bin/sh\necho "$@" > {run}/requeued\n'
    for name, text in {"srun": SRUN, "scontrol": scontrol, **command}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    step = {"SLURM_JOB_ID": str(free_port()), "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    path = f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return launch("bash", FOLDER / "slurm.sbatch", *arguments, PATH=path, ENVIRONMENT="BATCH", **step), step


@pytest.mark.slow
@pytest.mark.case("F11")
def test_the_slurm_script_runs(run):
    launched, _ = batch(run, run / "run.json")
    trained(launched, run)
    assert not (run / "requeued").exists()


@pytest.mark.case("F10")
@pytest.mark.parametrize(("code", "requeued"), [(75, True), (2, False)])
def test_the_slurm_job_is_queued_again_when_its_ranks_saved_and_left(run, code, requeued):
    launched, step = batch(run, "run.json", **{"ds-trainer": f"#!/bin/sh\nexit {code}\n"})
    assert launched.code == code
    assert (run / "requeued").exists() == requeued
    if requeued:
        assert (run / "requeued").read_text() == f"requeue {step['SLURM_JOB_ID']}\n"
