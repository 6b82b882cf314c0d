"""A disk that is full or not writable on one rank: all ranks agree, the checkpoint before is kept, a key decides."""

from __future__ import annotations

import resource

import pytest

from ds_trainer.callbacks.base import Callback
from ds_trainer.checkpoint.folder import file_faults, manifest_faults
from ds_trainer.errors import MachineError
from ds_trainer.metrics import read_metrics
from tests.helpers.runs import make_trainer


class FullDisk(Callback):
    """Files of one rank can no longer grow beyond 10 kB while the third and fourth step run."""

    def on_step_end(self, trainer) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.run.mesh.grid.rank == 1:
            limit = 10_000 if trainer.state.global_step in (3, 4) else hard
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


def train(out, policy, callbacks=(), every_steps=2):
    trainer = make_trainer(
        "zero2",
        out,
        given={"callbacks": list(callbacks)},
        run={"max_steps": 6, "epochs": 20},
        checkpoint={"export": False, "every_steps": every_steps, "on_save_error": policy},
    )
    try:
        trainer.train()
    except MachineError as error:
        return trainer.state.global_step, str(error), error.on_all_ranks
    return trainer.state.global_step, None, None


def full_disk(out, policy):
    return train(out, policy, [FullDisk()])


def names(out):
    return {path.name for path in out.iterdir() if "checkpoint" in path.name}


def is_whole(folder) -> bool:
    files, faults = manifest_faults(folder)
    return not faults and not file_faults(folder, files, files)


@pytest.mark.case("D7")
def test_a_full_disk_on_one_rank_stops_all_of_them_and_keeps_the_checkpoint_before(world, tmp_path):
    for step, text, agreed in world(full_disk, 2, tmp_path, "stop"):
        assert step == 4 and agreed
        assert "checkpoint-4 cannot be written" in text and "File too large" in text
    assert names(tmp_path) == {"checkpoint-2"} and is_whole(tmp_path / "checkpoint-2")


@pytest.mark.case("D7")
def test_with_the_other_policy_the_run_goes_on_and_saves_once_it_can(world, tmp_path):
    for step, text, _ in world(full_disk, 2, tmp_path, "continue"):
        assert step == 6 and text is None
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-6"} and is_whole(tmp_path / "checkpoint-6")


@pytest.mark.case("D7")
def test_a_place_that_cannot_be_written_is_named(world, tmp_path):
    (tmp_path / ".checkpoint-4.partial").mkdir()
    (tmp_path / ".checkpoint-4.partial" / "model").write_text("")
    blocked = world(block_and_train, 2, tmp_path)
    for step, text, _ in blocked:
        assert step == 4 and "checkpoint-4 cannot be written" in text
    assert is_whole(tmp_path / "checkpoint-2")


class Block(Callback):
    """A file stands where the next checkpoint's folder is to be made."""

    def on_step_end(self, trainer) -> None:
        from pathlib import Path

        if trainer.is_world_process_zero and trainer.state.global_step == 3:
            Path(trainer.config.run.output_dir, ".checkpoint-4.partial").touch()


def block_and_train(out):
    return train(out, "stop", [Block()])


class NoRoomForMetrics(Callback):
    """Files of rank 0 can no longer grow beyond what the metrics have, from the third step to the fifth."""

    def on_step_end(self, trainer) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.is_world_process_zero:
            limit = 700 if trainer.state.global_step in (3, 4) else hard
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


def no_room_for_metrics(out):
    return train(out, "stop", [NoRoomForMetrics()], every_steps=0)


def test_metrics_that_a_full_disk_does_not_take_end_no_run_and_follow(world, tmp_path):
    for step, text, _ in world(no_room_for_metrics, 2, tmp_path):
        assert step == 6 and text is None
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
