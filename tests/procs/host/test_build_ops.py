"""Compiling an op for real, with compilers that fail or never end."""

import os
import signal
import subprocess
import sys
import time

import pytest

ENSURE = "from ds_trainer.host.deepspeed_ops import ensure_ops; ensure_ops(['cpu_adam'])"
SOURCES = 2
# torch first asks the compiler for its version, which these two answer.
FAILS = 'case "$*" in *cpu_adam*) echo the compiler is out of patience >&2; exit 1;; *) exec c++ "$@";; esac'
HANGS = 'case "$*" in *cpu_adam*) echo $$ >> "$0.pids"; exec sleep 600;; *) exec c++ "$@";; esac'


@pytest.fixture
def compiler(tmp_path):
    """Makes a stand-in for the C++ compiler out of a line of shell, and returns the environment that uses it."""

    def make(line: str) -> dict[str, str]:
        path = tmp_path / "stand-in-c++"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return {**os.environ, "CXX": str(path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"), "DS_ACCELERATOR": "cpu"}

    return make


def ensure(environment: dict[str, str]) -> str:
    """Runs `ensure_ops`, which is to fail, in a process of its own, and returns what it wrote."""
    done = subprocess.run([sys.executable, "-c", ENSURE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
@pytest.mark.case("E9")
def test_a_compile_that_fails_shows_the_compilers_words_and_blocks_nobody(compiler, tmp_path):
    text = ensure(compiler(FAILS))
    assert "compiling DeepSpeed's cpu_adam once into" in text
    assert "DeepSpeed's cpu_adam did not compile" in text
    assert "the compiler is out of patience" in text
    assert not (tmp_path / "ops" / "cpu_adam" / "lock").exists()


@pytest.mark.slow
@pytest.mark.case("F9")
def test_after_a_build_was_killed_the_next_one_starts_at_once(compiler, tmp_path):
    environment = compiler(HANGS)
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    pids = tmp_path / "stand-in-c++.pids"
    builder = subprocess.Popen([sys.executable, "-c", ENSURE], env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == SOURCES) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    for pid in pids.read_text().split():  # ninja gives each compiler a process group of its own.
        os.kill(int(pid), signal.SIGKILL)
    assert lock.exists()
    text = ensure(compiler(FAILS))
    assert f"removed {lock}, left by a process that was killed" in text
    assert "did not compile" in text
