"""Free space for checkpoints is checked before the first step."""

import shutil
from collections import namedtuple

import pytest

from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint import disk_space
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import MachineError
from ds_trainer.trainer.checkpoint_manager import CheckpointManager

Usage = namedtuple("Usage", "free")
PARAMETERS = 10**9


def require(monkeypatch, caplog, free_gb, saves, **sections):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free_gb * 1e9))
    said = []
    monkeypatch.setattr(disk_space.get_logger(), "warning", lambda text, *args: said.append(text % args))
    disk_space.require_checkpoint_space(RunConfig.model_validate(sections), PARAMETERS, saves)
    return said


def test_a_run_whose_first_checkpoint_does_not_fit_is_refused(monkeypatch, caplog):
    with pytest.raises(MachineError, match="a checkpoint needs about 12.0 GB in .*, 11.9 GB free"):
        require(monkeypatch, caplog, 11.9, 1)


def test_room_for_the_one_in_the_making_beside_those_kept_is_asked_for(monkeypatch, caplog):
    assert require(monkeypatch, caplog, 36.1, 9) == []
    (warning,) = require(monkeypatch, caplog, 35.9, 9)
    assert "up to 3 checkpoints are there at once: needs about 36.0 GB in " in warning and "35.9 GB free" in warning
    assert require(monkeypatch, caplog, 24.1, 2) == []


def test_a_run_that_saves_nothing_needs_no_space(monkeypatch, caplog):
    assert require(monkeypatch, caplog, 0, 0) == []


def test_the_optimizer_decides_the_size(monkeypatch, caplog):
    with pytest.raises(MachineError, match=r"needs about 4\.0 GB"):
        require(monkeypatch, caplog, 1, 1, optimizer={"name": "sgd"})


@pytest.mark.parametrize(
    "every, done, last, left", [(500, 0, 499, 0), (500, 0, 500, 1), (500, 0, 501, 2), (3, 4, 10, 3), (0, 0, 9, 0)]
)
def test_saves_that_are_due(every, done, last, left):
    config = RunConfig.model_validate({"checkpoint": {"every_steps": every}})
    state = TrainerState(max_steps=last, global_step=done)
    assert CheckpointManager(config, state, save=None).saves_left() == left
