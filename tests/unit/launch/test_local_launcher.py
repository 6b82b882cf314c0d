"""`ds-trainer train --nproc N`: the ranks it starts, the signals it passes on, and the code it ends with."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ds_trainer.cli import main
from ds_trainer.cli import train as train_command
from ds_trainer.errors import ConfigError
from ds_trainer.launch import local_launcher
from ds_trainer.launch.environment import read_launch
from ds_trainer.launch.rank_grid import Grid

PLAIN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}


def python(code, *arguments):
    return [sys.executable, "-c", f"import json, os, signal, sys, time\n{code}", *map(str, arguments)]


def exits_with(*codes):
    """A command whose ranks end with these codes, negative ones by that signal, each after the one before."""
    return python(
        f"rank = int(os.environ['RANK']); time.sleep(0.5 * rank); code = {codes}[rank]\n"
        "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)"
    )


def places(folder, environ):
    show = python("open(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w').write(json.dumps(dict(os.environ)))", folder)
    assert local_launcher.run_ranks(show, 2, environ) == 0
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def test_every_rank_knows_its_place_and_shares_the_cores(tmp_path):
    found = places(tmp_path, PLAIN)
    launches = [read_launch(environ) for environ in found]
    assert [launch.grid for launch in launches] == [Grid(2, 0, 0, 2), Grid(2, 1, 1, 2)]
    assert {(launch.address, launch.port) for launch in launches} == {("127.0.0.1", found[0]["MASTER_PORT"])}
    assert int(found[0]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_what_the_user_set_is_kept(tmp_path):
    assert places(tmp_path, PLAIN | {"OMP_NUM_THREADS": "7"})[0]["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0), 0), ((2, 2), 2), ((0, 75), 75), ((75, 75), 75), ((2, 1), 2), ((0, -signal.SIGKILL), 137)],
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(codes, code):
    assert local_launcher.run_ranks(exits_with(*codes), 2, PLAIN) == code


def test_a_rank_that_stays_behind_one_that_failed_is_killed(monkeypatch, capsys):
    monkeypatch.setattr(local_launcher, "_GRACE_S", 0.3)
    stays = python("sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)")
    began = time.monotonic()
    assert local_launcher.run_ranks(stays, 2, PLAIN) == 3
    assert time.monotonic() - began < 20
    assert "ranks [0] did not end" in capsys.readouterr().err


def test_ranks_of_a_stopped_run_may_end_one_long_after_another(monkeypatch):
    monkeypatch.setattr(local_launcher, "_GRACE_S", 0.1)
    uploads = python("time.sleep(1 if os.environ['RANK'] == '0' else 0); sys.exit(75)")
    assert local_launcher.run_ranks(uploads, 2, PLAIN) == 75


@pytest.mark.case("F10")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_each_may_take_its_time(tmp_path, number):
    saves = python(
        "def save(*args):\n"
        "    time.sleep(1); open(f\"{sys.argv[1]}/saved-{os.environ['RANK']}\", 'w'); sys.exit(75)\n"
        f"signal.signal({int(number)}, save); open(f\"{{sys.argv[1]}}/up-{{os.environ['RANK']}}\", 'w')\n"
        "time.sleep(60)",
        tmp_path,
    )
    launcher = subprocess.Popen(
        python(f"from ds_trainer.launch.local_launcher import run_ranks; sys.exit(run_ranks({saves!r}, 2))"), env=PLAIN
    )
    while len(list(tmp_path.glob("up-*"))) < 2:
        time.sleep(0.05)
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == 75
    assert len(list(tmp_path.glob("saved-*"))) == 2


INSIDE = {
    "torchrun": ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0"),
    "mpirun": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        "rank 1 of 2 of an MPI",
    ),
    "mpiexec": ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, "rank 1 of 2 of an MPI"),
    "srun": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "SLURM_PROCID=0 of 2 tasks"),
}


@pytest.mark.case("F11")
@pytest.mark.parametrize(("environ", "found"), INSIDE.values(), ids=INSIDE)
def test_inside_another_launcher_it_is_refused(environ, found):
    with pytest.raises(ConfigError, match=f"--nproc, and the environment has {found}") as error:
        local_launcher.run_ranks(exits_with(0, 0), 2, environ)
    assert "leave --nproc out" in error.value.change


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
    ],
    ids=["batch script", "srun with one task"],
)
def test_slurm_may_have_started_the_one_process_that_starts_the_ranks(environ):
    assert local_launcher.run_ranks(exits_with(0, 0), 2, PLAIN | environ) == 0


def test_a_rank_gets_the_command_line_but_for_the_number_of_ranks(monkeypatch, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "ds.json").write_text("{}")
    seen = []
    monkeypatch.setattr(train_command, "run_ranks", lambda command, nproc: seen.append((command, nproc)) or 75)
    rest = [str(tmp_path / "run.json"), "--set=run.seed=1", "--set=data.train=a b.jsonl"]
    rest += [f"--deepspeed_config={tmp_path / 'ds.json'}", "--debug"]
    assert main(["train", "--nproc", "2", *rest]) == 75
    assert seen == [([sys.executable, "-u", "-m", "ds_trainer", "train", *rest], 2)]


def test_a_wrong_config_is_told_once_before_any_rank_starts(monkeypatch, tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"zro": {}}')
    monkeypatch.setattr(train_command, "run_ranks", lambda *args: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.json"), "--nproc", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("error: ") == 1


@pytest.mark.case("F11")
def test_the_argument_that_deepspeed_puts_first_is_understood(monkeypatch, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    seen = []
    monkeypatch.setattr(train_command, "check_local_rank", seen.append)
    monkeypatch.setattr(train_command, "run_ranks", lambda *args: 0)
    for before, after in ((["--local_rank=1"], []), ([], ["--local-rank", "1"]), ([], [])):
        main([*before, "train", str(tmp_path / "run.json"), "--nproc", "2", *after])
    assert seen == [1, 1, None]


def test_launchers_that_start_modules_can_start_the_command():
    done = subprocess.run([sys.executable, "-m", "ds_trainer", "train", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--nproc N" in done.stdout
