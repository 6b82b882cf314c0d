"""A run that is killed with `kill -9` and started again: what it does, when it is killed, and what must hold then."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from tqdm import tqdm

from ds_trainer.callbacks.base import Callback
from ds_trainer.checkpoint.folder import MANIFEST, checkpoints, file_faults, manifest_faults, step_of
from ds_trainer.metrics import read_metrics
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.failing import started, wait_for_ends
from tests.helpers.parity import collate, rows
from tests.helpers.resume import config, state_hash
from tests.helpers.tiny import tiny_llama

RANKS, STEPS, EVERY, KEEP_LAST = 2, 24, 2, 2
# 8 MB of state in each of twelve checkpoints: writing, syncing, hashing and renaming them takes most of the time.
SHAPE = {"hidden": 192, "layers": 1, "vocab": 515, "intermediate": 768, "attention_dropout": 0.1}
SURVIVOR_S = 15.0
"""A rank whose peer was killed ends by itself within this time."""
_LIFE_S = 120.0
_POLL_S = 0.0005
_FILE_S, _STEP_S = 0.01, 0.1
"""About how long a checkpoint waits for its next file, and a run for its next steps."""


@dataclass(frozen=True)
class Moment:
    """When a run is killed, and who.

    Args:
        event: "step", "save" (a checkpoint is being written), "commit" (it has its name, and an old one is still
            there) or "resume" (the ranks have met, and are not ready yet).
        step: At the earliest after so many steps of the life, unless it is "resume".
        progress: Of "save": the share of the files that are there by then.
        fraction: How far into what comes then.
        victims: Ranks.
    """

    event: str
    step: int
    progress: float
    fraction: float
    victims: tuple[int, ...]


@dataclass(frozen=True)
class Usual:
    """How much there is of what moments are shares of.

    Args:
        resume_s: Seconds from the ranks' meeting until they are ready.
        num_files: Files of a checkpoint.
    """

    resume_s: float
    num_files: int


@dataclass(frozen=True)
class Kill:
    """A kill that has happened.

    Args:
        engine: The run's.
        found: What the run was doing: "save", "commit", "resume" or "step".
        survivor_s: How long the other rank took to end; None where all were killed.
    """

    engine: str
    found: str
    survivor_s: float | None


def write_model(folder: Path) -> Path:
    """The checkpoint that all runs begin from."""
    tiny_llama(**SHAPE).save_pretrained(folder)
    return folder


class _Log(Callback):
    """Writes what this rank has done as it does it, so that it can be read after its death."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, **line: Any) -> None:
        """One line, in one piece."""
        self._file.write(json.dumps(line) + "\n")

    def on_init_end(self, trainer: Any) -> None:
        """The step from which it goes on."""
        self.write(ready_at=trainer.state.global_step, ready=time.monotonic())

    def on_step_end(self, trainer: Any) -> None:
        """The step."""
        state = trainer.state
        samples = trainer.run.train_loader.sampler.microbatches(state.global_step - 1)
        self.write(step=state.global_step, samples=samples, loss=state.loss, grad_norm=state.grad_norm)


class _Rows(list):
    """Training data that tells of its first use: by then the ranks have met, and watch over one another."""

    log: _Log | None = None

    def __len__(self) -> int:
        if self.log is not None:
            self.log.write(met=time.monotonic())
            self.log = None
        return super().__len__()


def job(out: Path, log: Path, model: Path, sections: dict) -> None:
    """Trains on this rank, from the newest checkpoint on."""
    sys.stdout = sys.stderr
    tqdm.set_lock(RLock())  # Its own, for processes, is not cleaned up by one that is killed.
    callback = _Log(log.with_name(f"{log.name}-{os.environ['RANK']}"))
    data = _Rows(rows(SHAPE["vocab"]))
    data.log = callback
    over = {
        "run": {"max_steps": STEPS},
        "checkpoint": {"every_steps": EVERY, "keep_last": KEEP_LAST, "resume": "auto"},
    }
    trainer = Trainer(
        config=config(out, model, sections, over), train_dataset=data, data_collator=collate, callbacks=[callback]
    )
    trainer.train()
    callback.write(state=state_hash(trainer))
    trainer.close()


class Life:
    """From one start of a run to its end: what its ranks have written.

    Args:
        log: Path of the log, to which ranks add their number.
    """

    def __init__(self, log: Path) -> None:
        self._log = log

    def lines(self, rank: int, key: str) -> list[dict[str, Any]]:
        """A rank's lines that hold a key."""
        path = self._log.with_name(f"{self._log.name}-{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if key in line]

    def value(self, rank: int, key: str) -> Any:
        """The value of a key in the last line that holds it; None where there is none."""
        lines = self.lines(rank, key)
        return lines[-1][key] if lines else None


class KilledRun:
    """A run in a folder of its own, which is killed and started again until it is left to end.

    Args:
        folder: Its folder.
        model: The checkpoint that it begins from.
        engine: What it is called in the report.
        sections: The config's sections that choose engine and stage.
    """

    def __init__(self, folder: Path, model: Path, engine: str, sections: dict) -> None:
        self._folder, self._model, self._engine, self._sections = folder, model, engine, sections
        self.lives: list[Life] = []
        folder.mkdir(parents=True)

    @property
    def out(self) -> Path:
        """Its output folder."""
        return self._folder / "out"

    def finish(self) -> None:
        """Lets it go on to its end."""
        with self._started() as (processes, folder):
            wait_for_ends(processes, _LIFE_S)
            codes = [process.exitcode for process in processes]
            assert codes == [0] * RANKS, f"exit codes {codes}: {_texts(folder)}"

    def kill(self, moment: Moment, usual: Usual) -> Kill:
        """Goes on, is killed, and leaves whole checkpoints, none of them lost.

        Args:
            moment: When, and who.
            usual: How much there is of what it is a share of.
        """
        before = self.newest_step()
        with self._started() as (processes, folder):
            self._await(moment, usual, lambda: all(process.is_alive() for process in processes))
            found = self._doing()
            for rank in moment.victims:
                os.kill(processes[rank].pid, signal.SIGKILL)
            killed = time.time()
            ends = wait_for_ends(processes, SURVIVOR_S)
            for rank, process in enumerate(processes):
                assert rank in ends, f"rank {rank} still runs {SURVIVOR_S} s after {moment}: {_texts(folder)}"
                was_killed = process.exitcode == -signal.SIGKILL
                assert was_killed == (rank in moment.victims), f"rank {rank}: {process.exitcode}: {_texts(folder)}"
                assert self.lives[-1].value(rank, "state") is None, "the run had ended before"
        self._check_checkpoints(before)
        survivors = [ends[rank] - killed for rank in range(RANKS) if rank not in moment.victims]
        return Kill(self._engine, found, max(survivors, default=None))

    def _started(self):
        log = self._folder / f"life-{len(self.lives)}"
        self.lives.append(Life(log))
        return started(job, RANKS, self.out, log, self._model, self._sections, store="tcp")

    def _await(self, moment: Moment, usual: Usual, alive: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LIFE_S
        while not self._has_come(moment, usual):
            assert alive() and time.monotonic() < deadline, f"{moment} did not come"
            time.sleep(_POLL_S)
        # Somewhere in what comes now.
        length_s = {"save": _FILE_S, "commit": 0.0, "resume": usual.resume_s, "step": _STEP_S}[moment.event]
        time.sleep(moment.fraction * length_s)

    def _has_come(self, moment: Moment, usual: Usual) -> bool:
        life = self.lives[-1]
        if moment.event == "resume":
            return all(life.lines(rank, "met") for rank in range(RANKS))
        if len(life.lines(0, "step")) < moment.step:
            return False
        if moment.event == "save":
            return self._num_files_aside() > moment.progress * usual.num_files
        return moment.event == "step" or self._doing() == moment.event

    def _doing(self) -> str:
        if not self.lives[-1].lines(0, "step"):  # What an earlier life has left may still be there.
            return "step" if all(self.lives[-1].lines(rank, "ready") for rank in range(RANKS)) else "resume"
        if self._num_files_aside():
            return "save"
        if len(checkpoints(self.out)) > KEEP_LAST or any(self.out.glob(".checkpoint-*.removed")):
            return "commit"
        return "step"

    def _num_files_aside(self) -> int:
        return sum(len(files) for aside in self.out.glob(".checkpoint-*.partial") for _, _, files in os.walk(aside))

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        return max(map(step_of, checkpoints(self.out)), default=0)

    def usual(self) -> Usual:
        """Of a run that was not killed: what the moments of another one are measured by."""
        (life,) = self.lives
        num_files = sum(len(files) for _, _, files in os.walk(checkpoints(self.out)[0]))
        return Usual(life.value(0, "ready") - life.value(0, "met"), num_files)

    def _check_checkpoints(self, before: int) -> None:
        assert self.newest_step() >= before, "a checkpoint was lost"
        for folder in checkpoints(self.out):
            files, faults = manifest_faults(folder)
            assert not faults + file_faults(folder, files, files)
            held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
            assert held == {*files, MANIFEST}


def check_same(run: KilledRun, straight: KilledRun) -> None:
    """A run that was killed has done what one that never was has: each step once, on the same samples, bit for bit."""
    assert len(run.lives) > 1
    (whole,) = straight.lives
    for rank in range(RANKS):
        expected = whole.lines(rank, "step")
        assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
        history: list[dict] = []
        for life in run.lives:
            start = life.value(rank, "ready_at")
            if start is None:
                continue  # Killed before it was ready.
            assert start <= len(history), "steps are missing"
            done = life.lines(rank, "step")
            history = history[:start] + done
        assert history == expected
        assert run.lives[-1].value(rank, "state") == whole.value(rank, "state")
    metrics, expected_metrics = (
        [(line["step"], line["loss"]) for line in read_metrics(one.out / "metrics.jsonl")] for one in (run, straight)
    )
    assert metrics == expected_metrics
    # A run that is killed before its first checkpoint starts anew, and keeps what it had logged as metrics.1.jsonl.
    kept, expected_names = (
        {path.name for path in one.out.iterdir() if not path.name.startswith("metrics.")} for one in (run, straight)
    )
    assert kept == expected_names


def _texts(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("stderr*")))
