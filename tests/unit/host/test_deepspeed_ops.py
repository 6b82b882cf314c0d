"""DeepSpeed's compiled ops: which are needed, stale locks, missing tools."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_trainer.config.resolved import Machine, ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import MachineError
from ds_trainer.host import deepspeed_ops, toolchain
from ds_trainer.host.build_lock import build_lock, clear_torch_lock, lock_holder, stale_locks

HOLD = "import sys, time; f = open(sys.argv[1], 'a'); print('held', flush=True); time.sleep(60)"


def run_of(optimizer="adamw", implementation="deepspeed_cpu", engine="deepspeed", **devices):
    zero = {"stage": 3, **{key: {"device": device, "nvme_path": "/drive"} for key, device in devices.items()}}
    config = RunConfig.model_validate({"zero": zero, "optimizer": {"name": optimizer}, "parallel": {"engine": engine}})
    return ResolvedConfig(config, Machine(), 1, implementation)


@pytest.mark.parametrize(
    ("resolved", "needed"),
    [
        (run_of(implementation="torch"), []),
        (run_of(offload_optimizer="cpu"), ["cpu_adam"]),
        (run_of("lion", offload_optimizer="cpu"), ["cpu_lion"]),
        (run_of(offload_optimizer="nvme"), ["cpu_adam", "async_io"]),
        (run_of(implementation="torch", offload_param="nvme"), ["async_io"]),
        (run_of("sgd", implementation="torch", offload_optimizer="cpu"), []),
        (run_of(implementation="torch", engine="ddp"), []),
    ],
)
def test_a_run_needs_only_the_ops_that_its_offload_uses(resolved, needed):
    assert deepspeed_ops.required_ops(resolved) == needed


def test_ops_go_to_the_environment_unless_a_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin")
    deepspeed_ops.use_own_extensions_dir()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
    assert os.environ["PATH"] == f"{tmp_path}/bin:/usr/bin"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/elsewhere")
    deepspeed_ops.use_own_extensions_dir()
    assert deepspeed_ops.extensions_dir() == Path("/elsewhere")
    assert os.environ["PATH"] == f"{tmp_path}/bin:/usr/bin"


def test_an_op_counts_as_built_only_for_the_environment_that_built_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "cpu_adam.so").touch()
    assert not deepspeed_ops.is_built("cpu_adam")
    (folder / "ds_trainer.json").write_text(json.dumps(deepspeed_ops._build_key()))
    assert deepspeed_ops.is_built("cpu_adam")
    monkeypatch.setattr(deepspeed_ops.torch, "__version__", "1.0")
    assert not deepspeed_ops.is_built("cpu_adam")


@pytest.fixture
def lock(tmp_path):
    """A lock file of torch in an extensions folder."""
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


@pytest.mark.case("F9")
def test_a_lock_left_by_a_build_of_ours_that_died_is_removed(lock):
    clear_torch_lock(lock, known_dead=True)
    assert not lock.exists()


@pytest.mark.case("F9")
def test_a_lock_of_unknown_origin_is_reported_with_the_file_to_delete(lock):
    with pytest.raises(MachineError, match=f"rm {lock}"):
        clear_torch_lock(lock, known_dead=False)
    assert lock.exists()


@pytest.mark.case("F9")
def test_a_lock_on_an_op_that_is_built_is_removed_after_the_seconds_that_loading_takes(lock):
    clear_torch_lock(lock, known_dead=False, grace_s=0.1)
    assert not lock.exists()


@pytest.mark.case("F9")
def test_a_lock_is_waited_for_while_its_holder_lives(lock):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    assert lock_holder(lock).pid == holder.pid
    assert stale_locks(lock.parent.parent) == []
    waiter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from ds_trainer.host.build_lock import clear_torch_lock; "
            "clear_torch_lock(Path(sys.argv[1]), known_dead=True)",
            str(lock),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert f"waiting for process {holder.pid}" in waiter.stderr.readline()
    assert lock.exists()
    holder.kill()
    holder.wait()
    assert waiter.wait(timeout=20) == 0
    assert not lock.exists()


@pytest.mark.case("F9")
def test_a_build_that_is_killed_leaves_a_note_for_the_next_one(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from ds_trainer.host.build_lock import build_lock\n"
        "with build_lock(Path(sys.argv[1])) as held:\n"
        "    held.begin('cpu_adam'); print('building', flush=True); time.sleep(60)"
    )
    builder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert builder.stdout.readline() == b"building\n"
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    with build_lock(tmp_path) as held:
        assert held.unfinished == "cpu_adam"
        held.end()
    with build_lock(tmp_path) as held:
        assert held.unfinished == ""


@pytest.mark.case("E9")
def test_a_missing_compiler_is_named_with_the_package_and_the_key(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MachineError) as error:
        deepspeed_ops.ensure_ops(["cpu_adam"])
    assert "no C++ compiler (no-such-compiler)" in error.value.found
    assert "g++" in error.value.change
    assert "zero.offload_optimizer.device" in error.value.change


@pytest.mark.case("E9")
def test_missing_libaio_is_named_with_the_package(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(MachineError, match="libaio") as error:
        toolchain.require_toolchain("async_io", "zero.offload_optimizer.device", compile_needed=False)
    assert "libaio-dev" in error.value.change


def test_a_built_op_needs_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    toolchain.require_toolchain("cpu_adam", "zero.offload_optimizer.device", compile_needed=False)
    with pytest.raises(MachineError, match="no C\\+\\+ compiler"):
        toolchain.require_toolchain("cpu_adam", "zero.offload_optimizer.device")
