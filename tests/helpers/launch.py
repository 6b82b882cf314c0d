"""Starts real processes as people do, with a launcher on the command line, and reads back what they said and when."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]
TRAIN = "examples/train.py"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES_OF_A_LAUNCHER = ("ACCELERATE_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Launched:
    """What a command did.

    Args:
        code: Exit code; negative where it was killed for not ending in time.
        lines: Seconds since the start and text of each line that any of its processes wrote.
    """

    code: int
    lines: list[tuple[float, str]]

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(line for _, line in self.lines)

    @property
    def seconds(self) -> float:
        """When the last line came."""
        return self.lines[-1][0]

    def when(self, text: str) -> float:
        """Seconds from the start to the first line that holds `text`."""
        return next(seconds for seconds, line in self.lines if text in line)


def launch(*command: str | Path, timeout_s: float = 120.0, **environ: str) -> Launched:
    """Runs a command in the repository's root; it and all it started are killed when the time is over.

    Args:
        command: The command line.
        timeout_s: Longest time.
        environ: Variables laid over this process's, from which those of a launcher are taken out.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=outside_a_launcher() | environ,
        start_new_session=True,
    )
    timer = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    assert process.stdout is not None
    lines = [(time.monotonic() - began, line) for line in process.stdout]
    code = process.wait()
    timer.cancel()
    return Launched(code, lines)


def outside_a_launcher() -> dict[str, str]:
    """This process's environment without the variables of a launcher that may have started the tests."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCHER and not name.startswith(_PREFIXES_OF_A_LAUNCHER)
    }
    return inherited | {"PYTHONUNBUFFERED": "1"}


def launch_together(environs: list[dict[str, str]], *command: str | Path) -> list[Launched]:
    """Runs one process per environment, all at once, as srun and mpirun do."""
    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(lambda environ: launch(*command, **environ), environs))


def deepspeed(*arguments: str | Path, port: int | None = None, **environ: str) -> Launched:
    """`deepspeed --num_gpus 2` with a port of its own, so that runs beside it do not collide."""
    port = free_port() if port is None else port
    return launch("deepspeed", "--num_gpus", "2", "--master_port", str(port), *arguments, **environ)


def python(*arguments: str | Path, **environ: str) -> Launched:
    """This environment's Python."""
    return launch(sys.executable, *arguments, **environ)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_jsonl(path: Path, rows: list) -> str:
    """Writes one record per line and returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(n: int = 8) -> list[dict]:
    """Conversations with answers of different lengths."""
    question = {"role": "user", "content": "what is the capital of France?"}
    return [{"messages": [question, {"role": "assistant", "content": "Paris " * (1 + i % 3)}]} for i in range(n)]


def run_folder(folder: Path) -> dict:
    """A tiny checkpoint with tokenizer, conversations, and the JSON of a run of three steps over them, on CPU."""
    train = write_jsonl(folder / "train.jsonl", chats())
    return {
        "model": {"path": make_checkpoint(folder / "checkpoint", "llama_tied")},
        "data": {"train": train, "cache_dir": str(folder / "cache"), "preview_samples": 0},
        "zero": {"stage": 2},
        "precision": {"dtype": "fp32"},
        "batch": {"global_size": 4, "accumulation": 1},
        "optimizer": {"lr": 1e-2},
        "run": {"max_steps": 3, "epochs": 10, "output_dir": str(folder / "out"), "device": "cpu"},
    }


def write_json(path: Path, content: dict) -> Path:
    """Writes a JSON file and returns its path."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
