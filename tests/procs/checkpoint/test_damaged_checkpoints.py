"""A checkpoint that is not whole is never taken: it is named, all ranks agree, and the one before goes on."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from pathlib import Path

import pytest

from ds_trainer.checkpoint.folder import manifest_faults
from ds_trainer.errors import CheckpointError
from ds_trainer.log import get_logger
from tests.helpers.runs import make_trainer

SAVING = {"checkpoint": {"export": False, "every_steps": 2, "keep_last": 5}}
ADAMW = {"name": "adamw", "lr": 1e-2}


def train(out, steps=6, resume=None, engine="zero2"):
    """Trains; returns the step it began at, the losses, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    get_logger().addHandler(handler)
    run = {"max_steps": steps, "epochs": 20}
    trainer = make_trainer(engine, out, optimizer=ADAMW, run=run, checkpoint=SAVING["checkpoint"] | {"resume": resume})
    began = trainer.state.global_step
    trainer.train()
    trainer.close()
    return began, [line.loss for line in trainer.state.log_history], "\n".join(said)


def fail_to_resume(out, resume):
    with pytest.raises(CheckpointError) as caught:
        train(out, resume=resume)
    return caught.value.found


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6, and its losses."""
    out = tmp_path_factory.mktemp("run")
    return out, world(train, 2, out)[0][1]


@pytest.fixture
def run_dir(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def files(kind: str) -> str:
    return {"state": "state-00001-000.safetensors", "rank": "rank-00000.safetensors"}.get(kind, kind)


NAMES = ["state", "rank", "index.json", "layout.json", "run.json", "trainer_state.json", "model/config.json"]


@pytest.mark.case("D7")
def test_every_kind_of_file_is_missed_and_the_checkpoint_before_goes_on(world, run_dir, trained):
    for name in map(files, NAMES):
        assert (run_dir / "checkpoint-6" / name).is_file(), name
    (run_dir / "checkpoint-6" / files("state")).unlink()
    truncate(run_dir / "checkpoint-4" / files("rank"))
    began, losses, said = world(train, 2, run_dir, 6, "auto")[0]
    assert began == 2
    assert losses == trained[1]
    assert "checkpoint-6/state-00001-000.safetensors is missing" in said
    assert "checkpoint-4/rank-00000.safetensors has" in said and "bytes instead of" in said


def faults_of_damage(run_dir):
    """Damages one file after the other, and asks both ranks what they find."""
    from ds_trainer.checkpoint.verified import _faults
    from ds_trainer.distributed.process_groups import init_mesh
    from ds_trainer.launch.environment import grid_from_environment

    mesh = init_mesh(grid_from_environment(), "cpu")
    found = {}
    for name in map(files, [*NAMES, "manifest.json"]):
        for damage in (truncate, flip, Path.unlink):
            folder = run_dir / "checkpoint-6"
            original = (folder / name).read_bytes()
            mesh.sum_over_dp(0)
            if mesh.grid.rank == 0:
                damage(folder / name)
            mesh.sum_over_dp(0)
            found[name, damage.__name__] = _faults(folder, mesh)
            mesh.sum_over_dp(0)
            if mesh.grid.rank == 0:
                (folder / name).write_bytes(original)
            mesh.sum_over_dp(0)
    assert _faults(run_dir / "checkpoint-6", mesh) == []
    return found


@pytest.mark.case("D7")
def test_any_damage_to_any_file_is_found_by_all_ranks_alike(world, run_dir):
    first, second = world(faults_of_damage, 2, run_dir)
    assert first == second
    for (name, damage), faults in first.items():
        assert faults and all(f"checkpoint-6/{name}" in fault for fault in faults), (name, damage, faults)


@pytest.mark.case("D7")
def test_a_damaged_checkpoint_that_is_asked_for_by_name_fails_on_all_ranks(world, run_dir):
    flip(run_dir / "checkpoint-4" / files("state"))
    first, second = world(fail_to_resume, 2, run_dir, str(run_dir / "checkpoint-4"))
    assert first == second
    assert "checkpoint-4/state-00001-000.safetensors has another SHA-256" in first


@pytest.mark.case("N5")
def test_what_only_one_rank_misses_ends_all_of_them_alike(world, run_dir):
    folder, name = run_dir / "checkpoint-4", files("rank")
    (folder / name).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    first, second = world(fail_to_resume, 2, run_dir, str(folder))
    assert first == second and name in first


@pytest.mark.case("D7")
def test_where_no_checkpoint_is_whole_nothing_is_replaced(world, run_dir):
    for folder in run_dir.glob("checkpoint-*"):
        truncate(folder / files("state"))
    for found in world(fail_to_resume, 2, run_dir, "auto"):
        assert "checkpoint-6, checkpoint-4, checkpoint-2, and none of them is complete" in found


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: (path / "checkpoint-3").mkdir(parents=True), "holds checkpoint-3: name one of them"),
        (
            lambda path: (path / "global_step3").mkdir(parents=True),
            "a checkpoint of DeepSpeed, which is pickled",
        ),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{}")), "looks like a Hugging Face folder"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text("[]")), "is no manifest, which has format"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text("{")), "manifest.json cannot be read"),
    ],
)
def test_what_is_taken_for_a_checkpoint_is_said(tmp_path, make, says):
    make(tmp_path / "it")
    files, (fault,) = manifest_faults(tmp_path / "it")
    assert not files and says in fault


def test_a_folder_without_a_manifest_is_no_checkpoint(world, run_dir):
    (run_dir / "checkpoint-9").mkdir()
    assert "manifest.json is missing" in world(fail_to_resume, 2, run_dir, str(run_dir / "checkpoint-9"))[0]
    assert world(train, 2, run_dir, 6, "auto")[0][0] == 6


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.case("C8")
def test_a_pickle_is_never_loaded_wherever_it_lies(world, run_dir, tmp_path):
    trace = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(trace))
    newest = run_dir / "checkpoint-6"
    manifest = json.loads((newest / "manifest.json").read_text())
    places = [newest / name for name in manifest["files"]]
    extra = ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", ".metadata", "training_args.bin", "pytorch_model.bin"]
    for path in [*places, *(newest / name for name in extra), *(run_dir / name for name in extra)]:
        path.write_bytes(bomb)
    # A forger may write a manifest to match.
    from ds_trainer.checkpoint.folder import fingerprint

    manifest["files"] = {name: fingerprint(newest / name) for name in manifest["files"]}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    for text in world(fail_to_resume, 2, run_dir, "auto"):
        assert "cannot be read" in text
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists(), "the bomb works"


@pytest.mark.case("C8")
def test_a_checkpoint_holds_safetensors_and_json_only(run_dir):
    suffixes = {path.suffix for path in (run_dir / "checkpoint-6").rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json"}
