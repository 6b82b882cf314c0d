"""DeepSpeed's compiled ops: which a run needs, whether they are built, and building them ahead.

DeepSpeed compiles an op at first use: minutes of silence in the middle of set-up. Here that happens before a model is
loaded, in a separate process, with the elapsed time shown.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.utils.cpp_extension import get_default_build_root

from ds_trainer.config.backend import backend
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.errors import MachineError
from ds_trainer.host.build_lock import BuildLock, build_lock, clear_torch_lock
from ds_trainer.host.toolchain import require_toolchain
from ds_trainer.log import get_logger

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "cpu_lion": "CPULionBuilder", "async_io": "AsyncIOBuilder"}
"""Op -> the name under which DeepSpeed's accelerator makes its builder."""

KEYS = {
    "cpu_adam": "zero.offload_optimizer.device",
    "cpu_lion": "zero.offload_optimizer.device",
    "async_io": "zero.offload_optimizer.device and zero.offload_param.device",
}
"""Op -> the config keys that need it."""

# Seen on two cores; more cores help, as ninja compiles the files side by side.
_USUAL_TIME = {"cpu_adam": "1 to 2 minutes", "cpu_lion": "1 to 2 minutes", "async_io": "2 to 7 minutes"}
_ON_ALL_RANKS = {"all_ranks": True}
_MARKER = "ds_trainer.json"
_LOG_LINES = 15
_LOG_WIDTH = 200
_REPEAT_S = 30.0
_LOADING_S = 10.0


def extensions_dir() -> Path:
    """Folder of the compiled ops: TORCH_EXTENSIONS_DIR, or one inside the Python environment, or torch's own.

    torch's own is one folder per user, keyed by op name only: two environments would overwrite each other's ops. It is
    used where the environment is not writable.
    """
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    if os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "torch_extensions"
    return Path(get_default_build_root())


def use_own_extensions_dir() -> None:
    """Makes this process and its children use `extensions_dir()` and the environment's own ninja.

    The first ninja on PATH has to stay the same: a different one compiles every op again.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_dir())
    bin_folder = str(Path(sys.prefix) / "bin")
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if path[0] != bin_folder:
        os.environ["PATH"] = os.pathsep.join([bin_folder, *path])


def disable_shm_comm() -> None:
    """Keeps DeepSpeed on CPU from compiling its shared-memory all-reduce (1 to 3 minutes); gloo replaces it.

    Call it before `deepspeed.init_distributed`, which is where the op is built if this table allows it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def required_ops(resolved: ResolvedConfig) -> list[str]:
    """The compiled ops that a run uses, in the order in which they are built."""
    config = resolved.config
    if backend(config) != "deepspeed":
        return []
    ops = []
    if resolved.optimizer_implementation == "deepspeed_cpu":
        ops.append("cpu_lion" if config.optimizer.name == "lion" else "cpu_adam")
    if "nvme" in (config.zero.offload_optimizer.device, config.zero.offload_param.device):
        ops.append("async_io")
    return ops


def is_built(op: str) -> bool:
    """Whether `op` is compiled for this environment, so that DeepSpeed loads it in seconds."""
    folder = extensions_dir() / op
    marker = folder / _MARKER
    return (folder / f"{op}.so").is_file() and marker.is_file() and json.loads(marker.read_text()) == _build_key()


def ensure_ops(ops: Sequence[str]) -> None:
    """Builds those of `ops` that are not built yet. Every rank calls it: one compiles, the others wait for a lock file.

    Raises:
        MachineError: A tool is missing, a compile failed, or a lock file of unknown origin is in the way.
    """
    use_own_extensions_dir()
    for op in ops:
        require_toolchain(op, KEYS[op], compile_needed=not is_built(op))
    for op in ops:
        with build_lock(extensions_dir()) as held:
            _clear_locks(op, held)
            if not is_built(op):
                _compile(op, held)


def _clear_locks(op: str, held: BuildLock) -> None:
    """Clears torch's lock files of an op, and of the op that DeepSpeed compiles along with it."""
    for name in ("pin_memory", op) if op == "async_io" else (op,):
        clear_torch_lock(
            extensions_dir() / name / "lock",
            known_dead=held.unfinished == op,
            # A built op is locked for the seconds that loading it takes, maybe by a process that is not visible here.
            grace_s=_LOADING_S if is_built(op) else None,
        )


def _compile(op: str, held: BuildLock) -> None:
    """Compiles one op in a separate process, which writes to `<folder>/<op>/ds_trainer.log`."""
    folder = extensions_dir() / op
    folder.mkdir(exist_ok=True)
    log = folder / "ds_trainer.log"
    if (folder / f"{op}.so").exists():
        text = "checking DeepSpeed's %s in %s: seconds, or %s if the environment has changed"
    else:
        text = "compiling DeepSpeed's %s once into %s: %s"
    get_logger().info(text, op, folder, _USUAL_TIME[op], extra=_ON_ALL_RANKS)
    # Loading an op builds it, and verifies that the result can be loaded.
    script = (
        "from deepspeed.accelerator import get_accelerator; "
        f"get_accelerator().create_op_builder({BUILDERS[op]!r}).load(verbose=True)"
    )
    held.begin(op)
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=output, stderr=subprocess.STDOUT)
        code = _wait(process, op)
    if code != 0:
        raise MachineError(
            f"DeepSpeed's {op} did not compile (exit code {code}); from {log}:\n    {_log_end(log)}",
            f"{KEYS[op]} needs this op",
            f'fix what the compiler names and run `ds-trainer doctor --build-ops`, or set {KEYS[op]} to "none"',
        )
    (folder / _MARKER).write_text(json.dumps(_build_key()))
    held.end()


def _log_end(log: Path) -> str:
    """The compiler's last lines, which come before Python's tracebacks, and the final error."""
    lines = [line[:_LOG_WIDTH] for line in log.read_text(errors="replace").splitlines()]
    tracebacks = (number for number, line in enumerate(lines) if line.startswith("Traceback"))
    compiler = lines[: next(tracebacks, len(lines) - 1)]
    return "\n    ".join(compiler[-_LOG_LINES:] + lines[-1:])


def _wait(process: subprocess.Popen, op: str) -> int:
    """Waits for a compile and shows the elapsed time: a spinner on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("compiling {task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(op, total=None)
            elapsed = 0.0
            while True:
                try:
                    return process.wait(timeout=_REPEAT_S)
                except subprocess.TimeoutExpired:
                    elapsed += _REPEAT_S
                    if not console.is_terminal:
                        get_logger().info("still compiling %s, %.0f s", op, elapsed, extra=_ON_ALL_RANKS)
    finally:
        process.kill()  # Nothing to kill unless an exception, such as Ctrl-C, ended the wait.
        process.wait()


def _build_key() -> dict[str, str]:
    """What a compiled op depends on: ninja compiles it again if any of it changes."""
    return {
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "python": sys.version.split()[0],
        "environment": sys.prefix,
        "ninja": shutil.which("ninja") or "",
        "accelerator": os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu"),
    }
