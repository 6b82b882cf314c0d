"""A signal that a person, a launcher or a cluster sends to a run: all of it ends soon, and nothing of it is lost."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from ds_trainer.checkpoint.folder import checkpoints, file_faults, manifest_faults
from ds_trainer.config.io import load_config
from ds_trainer.launch.signals import EXIT_CODE
from ds_trainer.metrics import read_metrics
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.launch import ROOT, TRAIN, chats, free_port, outside_a_launcher, run_folder, write_json, write_jsonl
from tests.helpers.tiers import tiers

STEPS = 100
LIMIT_S = 30.0
TAG = "RUN_OF_TEST_STOP"
NPROC = ("ds-trainer", "train", "--nproc", "2")
PYTHON = (sys.executable, TRAIN, "--config")
DEEPSPEED = ("deepspeed", "--num_gpus", "2", "--master_port", "{port}", TRAIN, "--config")
TORCHRUN = ("torchrun", "--nproc_per_node", "2", "--master_port", "{port}", TRAIN, "--config")


class Running:
    """A command with all that it has started, told from other processes by a variable of the environment."""

    def __init__(self, folder, *command):
        self.tag, self.log = uuid.uuid4().hex, folder / "log"
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                [str(part).format(port=free_port()) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=outside_a_launcher() | {TAG: self.tag},
                start_new_session=True,
            )

    def processes(self):
        """Environment of each of its processes that lives, by process."""
        found = {}
        for process in psutil.process_iter():
            try:
                environ = process.environ()
            except psutil.Error:  # Ended, a zombie, or somebody else's.
                continue
            if environ.get(TAG) == self.tag:
                found[process] = environ
        return found

    def wait_until(self, has_come):
        deadline = time.monotonic() + 100
        while not has_come():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def send(self, number, receiver):
        """Sends a signal to the launcher, as Ctrl-C does to all of the terminal's processes, or to one rank."""
        if receiver == "terminal":
            os.killpg(self.launcher.pid, number)
        elif receiver == "launcher":
            self.launcher.send_signal(number)
        else:
            (rank,) = (process for process, environ in self.processes().items() if environ.get("RANK") == "1")
            rank.send_signal(number)

    def wait_for_end(self):
        """The launcher's exit code, and how long it took until none of its processes was left."""
        began = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - began < LIMIT_S, f"{left.keys()} are left: {self.log.read_text()}"
            time.sleep(0.05)
        return self.launcher.wait(), time.monotonic() - began

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes():
            process.kill()
        self.launcher.wait()


def train(path, *settings):
    """Trains by a JSON on this rank, as the command line does."""
    trainer = Trainer(config=load_config(path, settings))
    trainer.train()
    trainer.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The JSON of a run that lasts some seconds and saves nothing of its own accord."""
    folder = tmp_path_factory.mktemp("run")
    content = run_folder(folder)
    content["run"] |= {"max_steps": STEPS, "epochs": 1000}
    content["logging"] = {"plots": False, "progress_bar": False}
    content["checkpoint"] = {"export": False}
    return write_json(folder / "run.json", content)


@pytest.fixture(scope="module")
def straight(world, config, tmp_path_factory):
    """Losses of runs that nobody stops, by the number of their ranks."""

    def run(ranks):
        out = tmp_path_factory.mktemp("straight")
        world(train, ranks, config, f"run.output_dir={out}")
        return losses(out)

    return {ranks: run(ranks) for ranks in (1, 2)}


def losses(out):
    return [(line["step"], line["loss"]) for line in read_metrics(out / "metrics.jsonl")]


CASES = {
    "SIGTERM to deepspeed": (DEEPSPEED, signal.SIGTERM, "launcher"),
    "Ctrl-C at deepspeed": (DEEPSPEED, signal.SIGINT, "terminal"),
    "SIGTERM to torchrun": (TORCHRUN, signal.SIGTERM, "launcher"),
    "SIGUSR1 to a rank of torchrun": (TORCHRUN, signal.SIGUSR1, "rank 1"),
    "SIGTERM to ds-trainer": (NPROC, signal.SIGTERM, "launcher"),
    "Ctrl-C at ds-trainer": (NPROC, signal.SIGINT, "terminal"),
    "SIGTERM to python": (PYTHON, signal.SIGTERM, "launcher"),
}


SLOW = ["Ctrl-C at deepspeed", "SIGTERM to torchrun", "SIGUSR1 to a rank of torchrun", "SIGTERM to ds-trainer"]


@pytest.mark.case("F10")
@pytest.mark.parametrize("case", tiers(CASES, slow=SLOW))
def test_all_processes_end_and_the_run_goes_on_exactly(world, tmp_path, config, straight, case):
    command, number, receiver = CASES[case]
    out, ranks = tmp_path / "out", 1 if command is PYTHON else 2
    with Running(tmp_path, *command, config, "--set", f"run.output_dir={out}") as running:
        metrics = out / "metrics.jsonl"
        running.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
        running.send(number, receiver)
        ended(running, passes_on=command in (NPROC, PYTHON))
    assert 3 < len(losses(out)) < STEPS
    (folder,) = checkpoints(out)
    files, faults = manifest_faults(folder)
    assert not faults + file_faults(folder, files, files)
    world(train, ranks, config, f"run.output_dir={out}", "checkpoint.resume=auto")
    assert losses(out) == straight[ranks]


def ended(running, passes_on):
    """All ended, with the run's exit code where the launcher passes that on."""
    code, seconds = running.wait_for_end()
    print(f"\nexit code {code}, all gone after {seconds:.1f} s")
    assert code == EXIT_CODE if passes_on else code != 0, running.log.read_text()


@pytest.mark.slow
@pytest.mark.case("F10")
def test_a_run_that_prepares_its_data_ends_and_can_be_started_again(world, tmp_path, config):
    out, cache = tmp_path / "out", tmp_path / "cache"
    data = write_jsonl(tmp_path / "many.jsonl", chats(50_000))
    settings = (f"run.output_dir={out}", "run.max_steps=3", f"data.train={data}", f"data.cache_dir={cache}")
    with Running(tmp_path, *TORCHRUN, config, *(f"--set={setting}" for setting in settings)) as running:
        running.wait_until(lambda: any(cache.rglob("*.part")))
        running.send(signal.SIGTERM, "rank 1")
        ended(running, passes_on=False)
    assert any(cache.rglob("*.stop")) and not any(cache.rglob("*.part"))
    assert not checkpoints(out)
    world(train, 2, config, *settings, "checkpoint.resume=auto")
    assert [step for step, _ in losses(out)] == [1, 2, 3]
