"""What compiling DeepSpeed's ops needs from the machine: compiler, ninja, Python's headers, libaio, CUDA toolkit."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME

from ds_trainer.errors import MachineError

# io_submit is what DeepSpeed calls; the header is what a machine with only the run-time library lacks.
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(nullptr, 0, nullptr); }\n"


def cxx() -> str:
    """The compiler that torch's extension builder calls."""
    return os.environ.get("CXX", "c++")


def has_compiler() -> bool:
    """Whether the compiler is on PATH."""
    return shutil.which(shlex.split(cxx())[0]) is not None


def has_ninja() -> bool:
    """Whether ninja is on PATH."""
    return shutil.which("ninja") is not None


def has_python_headers() -> bool:
    """Whether Python.h is installed."""
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def has_libaio() -> bool:
    """Whether a program that uses libaio compiles and links; CFLAGS and LDFLAGS are honoured, as DeepSpeed does."""
    if not has_compiler():
        return False
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "libaio.cpp"
        source.write_text(_LIBAIO_PROGRAM)
        command = [*shlex.split(cxx()), *flags[0], str(source), *flags[1], "-laio", "-o", f"{folder}/libaio"]
        return subprocess.run(command, capture_output=True).returncode == 0


def has_cuda_toolkit() -> bool:
    """Whether the CUDA toolkit is installed, where there is a GPU that would need it."""
    return not torch.cuda.is_available() or CUDA_HOME is not None


def require_toolchain(op: str, key: str, compile_needed: bool = True) -> None:
    """Checks that `op` can be compiled and loaded here.

    Args:
        op: `cpu_adam`, `cpu_lion` or `async_io`.
        key: The config key that leads to this op, for the message.
        compile_needed: False when the op is compiled already. Loading it needs ninja all the same, which finds
            nothing to do, and DeepSpeed probes libaio with the compiler before each load of async_io.

    Raises:
        MachineError: Something is missing.
    """
    uses_libaio = op == "async_io"
    checks = [
        (True, has_ninja, "ninja is not on PATH", "pip install ninja"),
        (compile_needed or uses_libaio, has_compiler, f"no C++ compiler ({cxx()}) is on PATH", _apt("g++")),
        (compile_needed, has_python_headers, "Python.h is missing", _apt("python3-dev")),
        (uses_libaio, has_libaio, "libaio's header or library is missing", _apt("libaio-dev")),
        # With a GPU, DeepSpeed links async_io against the CUDA toolkit; the CPU optimizers never.
        (
            compile_needed and uses_libaio,
            has_cuda_toolkit,
            "nvcc is missing",
            "install the CUDA toolkit, set CUDA_HOME",
        ),
    ]
    for wanted, present, found, remedy in checks:
        if wanted and not present():
            raise MachineError(
                f"{found}; DeepSpeed's {op} needs it",
                f"{key} runs DeepSpeed's {op}, which is C++ compiled on this machine",
                f'{remedy}, or set {key} to "none"',
            )


def _apt(package: str) -> str:
    return f"apt install {package} (Debian and Ubuntu's name of it)"
