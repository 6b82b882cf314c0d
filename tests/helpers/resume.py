"""Runs that are cut in two: what a resumed one must share, bit for bit, with one that was never interrupted."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.callbacks.base import Callback
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.parity import collate, rows
from tests.helpers.tiny import tiny_llama
from tests.helpers.world import RankFailed

STEPS, EVERY = 6, 3
# A layer with three matrices of 1M elements and a tied embedding of 1M: at 4 ranks each shard is still 1 MiB in fp32,
# below which DeepSpeed leaves it in memory whatever the config says. Dropout draws random numbers at every step.
SHAPE = {"hidden": 512, "layers": 1, "vocab": 2051, "intermediate": 2048, "attention_dropout": 0.1}


class Log(Callback):
    """What every step did: the samples of this rank, loss, norm and learning rate."""

    def __init__(self) -> None:
        self.steps: list[tuple] = []

    def on_pre_optimizer_step(self, trainer: Any) -> None:
        """The learning rate that the optimizer is about to use."""
        self.rates = [group["lr"] for group in trainer.engine.param_groups()]

    def on_step_end(self, trainer: Any) -> None:
        """The step."""
        state = trainer.state
        samples = trainer.run.train_loader.sampler.microbatches(state.global_step - 1)
        self.steps.append((state.global_step, samples, state.loss, state.grad_norm, self.rates, state.epoch))


def config(out: Path, checkpoint: Path, sections: dict, over: dict[str, dict]) -> dict:
    """Six steps over 14 samples in batches of 4, so that the third is in the middle of the first epoch."""
    base: dict[str, dict] = {
        "model": {"path": str(checkpoint)},
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "precision": {"dtype": "fp32"},
        "run": {"max_steps": STEPS, "epochs": 10, "output_dir": str(out), "device": "cpu"},
        "checkpoint": {"export": False, "every_steps": EVERY},
        "logging": {"plots": False, "progress_bar": False},
        **sections,
    }
    return base | {name: base.get(name, {}) | section for name, section in over.items()}


def write_checkpoint(folder: Path) -> Path:
    """The checkpoint that all runs begin from."""
    tiny_llama(**SHAPE).save_pretrained(folder)
    return folder


def train(out: Path, checkpoint: Path, sections: dict, over: dict[str, dict], die_after: int | None = None) -> tuple:
    """Trains on this rank; with `die_after` every rank kills itself at the end of that step.

    Returns:
        The log of its steps, a hash of weights and optimizer states, and the engine's facts.
    """
    log, callbacks = Log(), []
    if die_after is not None:
        callbacks.append(Die(die_after))
    trainer = Trainer(
        config=config(out, checkpoint, sections, over),
        train_dataset=rows(SHAPE["vocab"]),
        data_collator=collate,
        callbacks=[log, *callbacks],
    )
    trainer.train()
    result = (log.steps, state_hash(trainer), trainer.engine.facts())
    trainer.close()
    return result


class Die(Callback):
    """Kills the process, as `kill -9` does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        """Kills it."""
        if trainer.state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def state_hash(trainer: Trainer) -> str:
    """SHA-256 over this rank's masters, optimizer states and counts, and over all whole weights."""
    digest = hashlib.sha256()
    for name, handles in sorted(trainer.engine.state().items()):
        for key, handle in sorted(handles.items()):
            value = handle.read()
            assert value.dim() or value.item() == trainer.state.global_step, (
                f"{key} of {name} counts {value.item()} steps"
            )
            digest.update(f"{name} {key} {value.dtype}".encode() + value.cpu().numpy().tobytes())
    for name, value in trainer.engine.full_parameters():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def killed_and_resumed(world, out, ranks, checkpoint, sections):
    """Every rank kills itself after a checkpoint; a second world goes on from there."""
    with pytest.raises(RankFailed):
        world(train, ranks, out, checkpoint, sections, {}, EVERY + 1)
    assert [path.name for path in sorted(out.glob("checkpoint-*"))] == [f"checkpoint-{EVERY}"]
    return world(train, ranks, out, checkpoint, sections, {"checkpoint": {"resume": "auto"}})


def check_resumed(straight, resumed):
    """The resumed run's steps and its state at the end are the straight run's, bit for bit."""
    for (steps, state, _), (later_steps, later_state, _) in zip(straight, resumed, strict=True):
        assert [step[0] for step in later_steps] == list(range(EVERY + 1, STEPS + 1))
        assert later_steps == steps[EVERY:]
        assert later_state == state
