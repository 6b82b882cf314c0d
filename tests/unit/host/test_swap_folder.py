"""Swap folders: one per run and rank, none left behind."""

import json
import subprocess
import sys

import pytest

from ds_trainer.errors import MachineError
from ds_trainer.host.swap_folder import Owner, SwapFolder, remove_stale_swap_folders

HOLD = (
    "import sys, time; from ds_trainer.host.swap_folder import SwapFolder\n"
    "folder = SwapFolder(sys.argv[1], 'other', 0); print(folder.path, flush=True); time.sleep(float(sys.argv[2]))"
)


def start(root, seconds):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == str(root / "ds_trainer-other" / "rank0")
    return process


def test_each_rank_has_a_folder_of_its_own_and_closing_the_last_removes_the_run(tmp_path):
    folders = [SwapFolder(tmp_path, "run", rank) for rank in range(2)]
    assert [folder.path.relative_to(tmp_path).as_posix() for folder in folders] == [
        "ds_trainer-run/rank0",
        "ds_trainer-run/rank1",
    ]
    (folders[0].path / "zero_stage_3").mkdir()
    (folders[0].path / "zero_stage_3" / "a.tensor.swp").write_bytes(b"12345")
    assert folders[0].bytes() == 5
    folders[0].close()
    assert not folders[0].path.exists()
    assert folders[1].path.exists()
    folders[1].close()
    folders[1].close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("E6")
def test_two_jobs_on_one_path_do_not_meet(tmp_path):
    other = start(tmp_path, 60)
    mine = SwapFolder(tmp_path, "mine", 0)
    assert (tmp_path / "ds_trainer-other" / "rank0" / "owner.json").exists()
    mine.close()
    other.kill()
    other.wait()


@pytest.mark.case("E6")
def test_what_a_killed_run_left_is_removed_at_the_next_start(tmp_path):
    killed = start(tmp_path, 60)
    (tmp_path / "ds_trainer-other" / "rank0" / "x.tensor.swp").write_bytes(b"1")
    killed.kill()
    killed.wait()
    mine = SwapFolder(tmp_path, "mine", 0)
    assert not (tmp_path / "ds_trainer-other").exists()
    mine.close()


@pytest.mark.case("E6")
def test_a_run_that_ends_without_closing_leaves_nothing(tmp_path):
    assert start(tmp_path, 0).wait(timeout=30) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_live_runs_folder_cannot_be_taken(tmp_path):
    folder = SwapFolder(tmp_path, "run", 0)
    with pytest.raises(MachineError, match="exists already"):
        SwapFolder(tmp_path, "run", 0)
    folder.close()


def test_a_folder_of_another_machine_is_left_alone(tmp_path):
    folder = tmp_path / "ds_trainer-far" / "rank0"
    folder.mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps({"host": "another-machine", "pid": 1, "started": 0.0}))
    remove_stale_swap_folders(tmp_path)
    assert folder.exists()


def test_a_process_number_that_was_given_away_again_is_not_the_owner():
    me = Owner.this_process()
    assert not me.is_dead
    assert Owner(me.host, me.pid, me.started - 100).is_dead
