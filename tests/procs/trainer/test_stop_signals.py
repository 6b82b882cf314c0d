"""A signal to any one rank, at any moment, ends all ranks with one whole checkpoint and an exit code of its own."""

from __future__ import annotations

import os
import signal

import pytest

from ds_trainer.callbacks.base import Callback
from ds_trainer.launch.signals import EXIT_CODE
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tiny import tiny_llama
from tests.helpers.tokenizers import make_tokenizer

STEPS = 6


class Kill(Callback):
    """Sends a signal to one rank, when a given event happens at a given step."""

    def __init__(self, number: int, event: str, step: int, rank: int) -> None:
        self.number, self.event, self.step, self.rank = number, event, step, rank

    def __getattribute__(self, name):
        own = object.__getattribute__
        if name.startswith("on_") and name == own(self, "event"):
            return own(self, "fire")
        return own(self, name)

    def fire(self, trainer, *args) -> None:
        if trainer.run.mesh.grid.rank == self.rank and trainer.state.global_step == self.step:
            os.kill(os.getpid(), self.number)


class KillWhileSaving:
    """A tokenizer whose files are written in the middle of a save, at which a signal comes."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.saves = tokenizer, 0

    def save_pretrained(self, folder) -> None:
        self.saves += 1
        if self.saves == 2:  # The first is the trial.
            os.kill(os.getpid(), signal.SIGTERM)
        self._tokenizer.save_pretrained(folder)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def train(out, engine, callbacks=(), given=None, model=None, **checkpoint):
    """Trains; returns the exit code (0: to the end), the losses of every step, and the steps of this process."""
    trainer = make_trainer(
        engine,
        out,
        model=model,
        given={"eval_dataset": D8[:3], "callbacks": list(callbacks)} | (given or {}),
        optimizer={"name": "adamw", "lr": 1e-2},
        run={"max_steps": STEPS, "epochs": 20},
        evaluation={"every_steps": 3, "batch_size": 1},
        checkpoint={"export": False, "every_steps": 4, **checkpoint},
    )
    code = 0
    try:
        trainer.train()
    except SystemExit as stop:
        code = stop.code
    history = [
        (line.step, getattr(line, "loss", None), getattr(line, "eval_loss", None)) for line in trainer.state.log_history
    ]
    trainer.close()
    return code, history, trainer.state.global_step


def stop(out, engine, number, event, step, rank):
    return train(out, engine, [Kill(number, event, step, rank)])


def stop_while_saving(out, engine):
    tokenizer = KillWhileSaving(make_tokenizer(vocab_size=300))
    return train(out, engine, given={"processing_class": tokenizer}, model=tiny_llama(vocab=300))


def resume(out, engine, vocab=65):
    return train(out, engine, model=tiny_llama(vocab=vocab), resume="auto")


@pytest.fixture(scope="module")
def straight(world, tmp_path_factory):
    return {engine: world(train, 2, tmp_path_factory.mktemp(engine), engine)[0][1] for engine in ("ddp", "zero3")}


@pytest.mark.case("F10")
@pytest.mark.parametrize(
    "engine, number, event, step, rank, saved",
    [
        ("zero3", signal.SIGTERM, "on_step_begin", 2, 1, 3),
        ("ddp", signal.SIGINT, "on_pre_optimizer_step", 1, 0, 2),
        ("ddp", signal.SIGUSR1, "on_prediction_step", 3, 1, 3),
        ("zero3", signal.SIGUSR1, "on_prediction_step", 6, 0, 6),
        ("ddp", signal.SIGTERM, "on_save", 4, 1, 5),
        ("ddp", signal.SIGHUP, "on_train_begin", 0, 1, 1),
    ],
)
def test_all_ranks_stop_with_one_whole_checkpoint_and_go_on_exactly(
    world, tmp_path, straight, engine, number, event, step, rank, saved
):
    stopped = world(stop, 2, tmp_path, engine, number, event, step, rank)
    assert [code for code, _, _ in stopped] == [EXIT_CODE, EXIT_CODE]
    assert [at for _, _, at in stopped] == [saved, saved]
    assert f"checkpoint-{saved}" in {path.name for path in tmp_path.iterdir()}
    for code, history, _ in world(resume, 2, tmp_path, engine):
        assert code == 0
        assert history == straight[engine]


@pytest.mark.case("F10")
def test_a_signal_in_the_middle_of_a_save_leaves_that_checkpoint_whole(world, tmp_path):
    stopped = world(stop_while_saving, 2, tmp_path, "ddp")
    assert [code for code, _, _ in stopped] == [EXIT_CODE, EXIT_CODE]
    names = {path.name for path in tmp_path.iterdir()}
    assert "checkpoint-4" in names and not any("partial" in name for name in names)
    assert max(step for step, _, _ in world(resume, 2, tmp_path, "ddp", 300)[0][1]) == STEPS


def second_interrupt(out):
    class Twice(Callback):
        def on_step_end(self, trainer):
            import time

            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(out, "ddp", [Twice()])
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_at_once_and_leaves_pythons_own_handlers(world, tmp_path):
    assert world(second_interrupt, 1, tmp_path) == [True]
    assert not list(tmp_path.glob("checkpoint-*"))
