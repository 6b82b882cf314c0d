"""Trackers get every number of the run under transformers' names, and cannot hold it up or end it."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import threading
import time
from pathlib import Path

import accelerate.tracking
import pytest
from accelerate.state import PartialState

from ds_trainer.callbacks import trackers
from ds_trainer.errors import MachineError
from ds_trainer.metrics import StepMetrics
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tensorboard import scalars


def trained(out, report_to, state=None, steps=2):
    """Trains, as after a resume where there is a state; returns what would go into a checkpoint, and the log."""
    trainer = make_trainer(
        "ddp",
        out,
        given={"eval_dataset": D8[:2]},
        run={"max_steps": steps},
        evaluation={"every_steps": 1},
        logging={"report_to": report_to, "run_name": "first try"},
    )
    callback = next(each for each in trainer.callbacks if isinstance(each, trackers.TrackerCallback))
    if state is not None:
        callback.load_state_dict(state)
        trainer.state.global_step = steps - 1
    trainer.train()
    assert PartialState._shared_state == {}, "accelerate's singleton has been set up"
    return callback.state_dict(), trainer.state.log_history


def test_tensorboard_gets_the_numbers_of_the_run_from_rank_0(world, tmp_path):
    (state, history), (other, _) = world(trained, 2, tmp_path, ["tensorboard"])
    assert (state, other) == ({"tensorboard": "first try"}, {})
    folder = tmp_path / "tensorboard" / "first try"
    training = [line for line in history if isinstance(line, StepMetrics)]
    for tag, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("learning_rate", "lr")):
        events = scalars(folder, f"train/{tag}")
        assert [event.step for event in events] == [1, 2]
        assert [event.value for event in events] == pytest.approx([getattr(line, key) for line in training])
    assert [event.step for event in scalars(folder, "eval/loss")] == [1, 2]
    (hparams,) = folder.glob("*/hparams.yml")
    assert "run.max_steps: 2" in hparams.read_text()
    assert "evaluation.batch_size: 2" in hparams.read_text(), "not the resolved config"
    assert len(list(folder.glob("events.*"))) == 1, "a rank beside 0 has written too"


def test_a_resumed_run_goes_on_in_its_folder_and_a_new_one_takes_another(world, tmp_path):
    ((state, _),) = world(trained, 1, tmp_path, ["tensorboard"], None, 3)
    world(trained, 1, tmp_path, ["tensorboard"], state, 3)
    folder = tmp_path / "tensorboard" / "first try"
    assert len(list(folder.glob("events.*"))) == 2
    assert len(list(folder.glob("*/hparams.yml"))) == 1
    # The step after the checkpoint stands there once, though both wrote it.
    assert [event.step for event in scalars(folder, "train/loss")] == [1, 2, 3]
    ((state, _),) = world(trained, 1, tmp_path, ["tensorboard"])
    assert state == {"tensorboard": "first try.1"}


class Fake(accelerate.tracking.GeneralTracker):
    """Takes what it is given; faults are planted in the methods of its kinds."""

    requires_logging_directory = False
    tracker = None
    run_name = "fake"

    def __init__(self, *args, **kwargs):
        self.lines, self.finished = [], False
        Fake.made = self

    def log(self, values, step=None, **kwargs):
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


class FailsInTheMiddle(Fake):
    def log(self, values, step=None, **kwargs):
        super().log(values, step)
        if 1 < len(self.lines) < 4:
            raise ConnectionError(f"no route to host at line {len(self.lines)}")


class Hangs(Fake):
    def log(self, values, step=None, **kwargs):
        threading.Event().wait()


class FailsAtStart(Fake):
    def start(self):
        raise PermissionError("api key is wrong")


class HangsAtStart(Fake):
    def start(self):
        threading.Event().wait()


def train_with(kind, out):
    accelerate.tracking.TensorBoardTracker = kind
    err = io.StringIO()
    trackers.FINISH_S = 1.0
    began = time.monotonic()
    with contextlib.redirect_stderr(err):
        _, history = trained(out, ["tensorboard"], steps=3)
    return len(history), Fake.made, err.getvalue(), time.monotonic() - began


def lose_lines(out):
    logged, tracker, err, _ = train_with(FailsInTheMiddle, out)
    assert logged == 6
    assert len(tracker.lines) == 6
    assert tracker.finished
    assert err.count("tensorboard loses lines: ConnectionError: no route to host at line 2") == err.count("loses") == 1


def test_a_tracker_that_fails_in_the_middle_is_one_warning(world, tmp_path):
    world(lose_lines, 1, tmp_path)


def outlive(out):
    logged, _, err, took_s = train_with(Hangs, out)
    assert logged == 6
    assert "tensorboard has not finished within 1 s: unsent lines are lost" in err
    assert took_s < 20


def test_a_tracker_that_hangs_holds_up_nothing(world, tmp_path):
    world(outlive, 1, tmp_path)


def start_with(kind, out, expected):
    accelerate.tracking.TensorBoardTracker = kind
    trackers.START_S = 1.0
    trainer = make_trainer("ddp", out, logging={"report_to": ["tensorboard"]})
    with pytest.raises(MachineError, match=expected):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FailsAtStart, "tensorboard does not start: PermissionError: api key is wrong"),
        (HangsAtStart, "tensorboard has not started within 1 s"),
    ],
)
def test_a_tracker_that_does_not_start_ends_every_rank_before_the_first_step(world, tmp_path, kind, expected):
    world(start_with, 2, kind, tmp_path, expected)


def track_offline(out, name):
    """Three steps and, as after a resume, a fourth."""
    os.chdir(out)
    os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(out / "trackio")}
    os.environ |= {"MLFLOW_TRACKING_URI": f"file:{out}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    state, _ = trained(out, [name], steps=3)
    resumed, _ = trained(out, [name], state, steps=4)
    assert resumed == state
    return state[name]


def wandb_run(out: Path, run: str) -> None:
    files = [path.read_bytes() for path in sorted(out.glob(f"wandb/offline-*/run-{run}.wandb"))]
    assert len(files) == 2
    assert all(b"train/loss" in file and b"eval/loss" in file for file in files)
    assert b"run.max_steps" in files[0]


def mlflow_run(out: Path, run: str) -> None:
    (folder,) = out.glob(f"mlruns/*/{run}")
    lines = (folder / "metrics" / "train" / "loss").read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["1", "2", "3", "4"]
    assert (folder / "params" / "run.max_steps").read_text() == "3"


def trackio_run(out: Path, run: str) -> None:
    (file,) = out.glob("trackio/*.db")
    with contextlib.closing(sqlite3.connect(file)) as database:
        rows = database.execute("select step, metrics from metrics where run_name = ? order by id", (run,)).fetchall()
    assert [step for step, metrics in rows if b"train/loss" in metrics] == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "check"), [("wandb", wandb_run), ("mlflow", mlflow_run), ("trackio", trackio_run)])
def test_the_other_trackers_take_a_run_offline_and_go_on_after_a_resume(world, tmp_path, name, check):
    pytest.importorskip(name)
    (run,) = world(track_offline, 1, tmp_path, name)
    check(tmp_path, run)
