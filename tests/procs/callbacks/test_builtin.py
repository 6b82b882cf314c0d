"""What the built-in callbacks leave behind, however a run ends."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ds_trainer.callbacks.base import Callback
from ds_trainer.metrics import read_metrics
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tensorboard import scalars

PLOTTING = {"plots": True, "progress_bar": True}


class Breaks(Callback):
    def __init__(self, event: str, step: int) -> None:
        self._step = step
        setattr(self, event, self._break)

    def _break(self, trainer, *args):
        if trainer.state.global_step == self._step:
            raise ZeroDivisionError("planted")


def break_at(event, step, out):
    trainer = make_trainer(
        "ddp", out, given={"callbacks": [Breaks(event, step)]}, run={"max_steps": 3}, logging=PLOTTING
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()


class Interrupted(Callback):
    def on_step_begin(self, trainer):
        if trainer.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def interrupt(out):
    trainer = make_trainer("ddp", out, given={"callbacks": [Interrupted()]}, run={"max_steps": 3}, logging=PLOTTING)
    with pytest.raises(SystemExit):
        trainer.train()


def test_a_run_that_a_signal_stops_has_pictures_of_its_steps(world, tmp_path):
    world(interrupt, 1, tmp_path)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_a_run_that_breaks_has_its_metrics_and_draws_nothing_while_others_wait(world, tmp_path):
    world(break_at, 1, "on_step_begin", 2, tmp_path)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "loss.png").exists()


def test_a_run_that_breaks_before_its_first_step_has_none(world, tmp_path):
    world(break_at, 1, "on_step_begin", 0, tmp_path)
    assert not list(tmp_path.glob("*.png"))


def go_on(out):
    """Trains three steps and then, as after a resume of a checkpoint of the second one, the third."""
    trainer = make_trainer("ddp", out, run={"max_steps": 3}, logging=PLOTTING)
    history = list(trainer.train().log_history)
    trainer = make_trainer("ddp", out, run={"max_steps": 3}, logging=PLOTTING)
    trainer.state.global_step = 2
    trainer.state.log_history = [replace(line, lr=0.25) for line in history[:2]]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer.train()
        trainer._call("on_save", Path("there/checkpoint-3"))
    return said.getvalue()


def test_a_resumed_run_has_the_lines_before_it_once_and_shows_its_own_step(world, tmp_path):
    (said,) = world(go_on, 1, tmp_path)
    assert [(line["step"], line["lr"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 0.25),
        (2, 0.25),
        (3, 1.0),
    ]
    assert "step 3/3" in said
    assert "step 3: checkpoint there/checkpoint-3" in said


def stop_early(out, breaks_at=None):
    """Trains where no gain counts but that of the first evaluation; returns the last step and how many it took."""
    callbacks = [] if breaks_at is None else [Breaks("on_step_begin", breaks_at)]
    trainer = make_trainer(
        "ddp",
        out,
        given={"eval_dataset": D8[:2], "callbacks": callbacks},
        run={"max_steps": 10},
        evaluation={"every_steps": 1, "early_stopping_patience": 3, "early_stopping_threshold": 100.0},
        checkpoint={"every_steps": 1, "resume": "auto"},
        logging={"report_to": ["tensorboard"], "run_name": "run"},
    )
    before = trainer.state.global_step
    with contextlib.suppress(ZeroDivisionError):
        trainer.train()
    return trainer.state.global_step, trainer.state.global_step - before


def test_early_stopping_and_trackers_go_on_over_a_resume(world, tmp_path):
    assert world(stop_early, 1, tmp_path / "straight") == [(4, 4)]
    assert world(stop_early, 1, tmp_path / "broken", 3) == [(3, 3)]
    assert world(stop_early, 1, tmp_path / "broken") == [(4, 1)]
    assert world(stop_early, 1, tmp_path / "broken") == [(4, 0)], "a run that early stopping has ended goes on"
    # The evaluation of the checkpoint's own step comes after the saving of it, and so once more after the resume.
    steps = [event.step for event in scalars(tmp_path / "broken" / "tensorboard" / "run", "eval/loss")]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    steps = [event.step for event in scalars(tmp_path / "broken" / "tensorboard" / "run", "train/loss")]
    assert steps == [1, 2, 3, 4]
