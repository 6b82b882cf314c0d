"""What this package does on one GPU: rates beside the HF Trainer's, offload, fp16, the chunked loss; then tests/gpu.

    python benchmarks/gpu.py            under 8 minutes on a GPU of 80 GB or more
    python benchmarks/gpu.py --small    the same script with tiny models on the CPU, to see that it works

Nothing is downloaded: models are made from configs, with random weights. DeepSpeed's CPU Adam is compiled first, and
its minutes do not count. Every part is a process of its own: one that fails leaves the others' numbers as they are, and
is told by the exit code 1. A part that would end too late is left out, and said.

MFU (model FLOPs utilisation) = FLOPs that the model needs per token (`Work.flops_per_token`) x tokens/s / the rate at
which this very device multiplies two square matrices of the same number format.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from overhead import LAUNCHER_VARIABLES
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SIDES = Path(__file__).parent / "sides"
BUDGET_S = 480.0
BUILD_LIMIT_S = 600.0
PATIENCE = 3.0
"""A part is given up after so many times its usual duration."""
LOG_LINES = 40
GIB = 2**30
LOSS_TOLERANCE = {"full": 2e-2, "small": 1e-5}
"""Relative, step by step; bf16 rounds to 4e-3, at other places in each engine."""


@dataclass(frozen=True)
class Part:
    """A process that leaves numbers.

    Args:
        name: A run of `sides/gpu_workload.py`, or `matmul`, `hf`, `tests`.
        usual_s: About how long it takes, start included.
    """

    name: str
    usual_s: float

    def command(self, size: str) -> list[str]:
        """The script and its arguments, up to the folder of the result."""
        own = {"matmul": ["gpu_matmul.py"], "hf": ["gpu_hf_trainer.py"]}
        script, *arguments = own.get(self.name, ["gpu_ours.py", self.name])
        return [sys.executable, str(SIDES / script), *arguments, size]


TESTS = Part("tests", 60)
PARTS = [
    Part("matmul", 15),
    Part("hf", 35),
    Part("ddp", 35),
    Part("fsdp2", 35),
    Part("zero2", 35),
    Part("zero3_offload", 80),
    Part("fsdp2_offload", 50),
    Part("fp16", 35),
    Part("whole_loss", 25),
    Part("chunked_loss", 25),
    Part("zero1", 35),
    TESTS,
]
"""In the order of their worth; the time of the tests, which come last, is kept free."""
SAME_LOSSES = ("hf", "ddp", "fsdp2", "zero1", "zero2", "fsdp2_offload")
"""Parts that do the same work."""
GPU_ONLY = {"fp16": "a CPU has no arithmetic for it"}


class PartFailed(Exception):
    """A part ended in an error, or not in time; the text holds the end of what it printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU, in fp32")
    size = "small" if parser.parse_args().small else "full"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{device(size)}; {versions()}")
    environ = environment(size)
    failures = build_ops(console, environ)
    results, failed = run_parts(console, size, environ)
    failures += failed + check_losses(results, LOSS_TOLERANCE[size])
    console.print(table(results))
    for text in failures:
        console.print(f"FAILED {text}", style="red")
    print(" ".join(f"{name}={value:.6g}" for name, value in summary(results).items()))
    raise SystemExit(1 if failures else 0)


def device(size: str) -> str:
    """Name of what is measured; ends the script where there is no GPU."""
    import torch

    if size == "small":
        return f"{os.cpu_count()} CPU cores, a rehearsal with tiny models"
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU, and this benchmark measures one: run it where nvidia-smi shows "
            "one and torch is built for CUDA, or rehearse it on the CPU with --small"
        )
    gpu = torch.cuda.get_device_properties(0)
    return f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB"


def versions() -> str:
    """Those that rates depend on."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))


def environment(size: str) -> dict[str, str]:
    """Variables of every part: one process, one GPU, and all cores for the optimizer that runs on the host."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] if size == "full" else ""
    cores = str(len(os.sched_getaffinity(0)))
    return environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": cores, "HF_HUB_OFFLINE": "1"}


def build_ops(console: Console, environ: dict[str, str]) -> list[str]:
    """Compiles what CPU offload needs; returns what failed."""
    command = [sys.executable, "-m", "ds_trainer", "doctor", "--build-ops", "--ops", "cpu_adam"]
    try:
        run_process(command, environ, BUILD_LIMIT_S)
    except PartFailed as error:
        return [f"build_ops: {error}"]
    console.print("DeepSpeed's cpu_adam is built")
    return []


def run_parts(console: Console, size: str, environ: dict[str, str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Every part that fits into the time, and the tests: the results by name, and what failed."""
    results: dict[str, dict[str, Any]] = {}
    failures = []
    ends = time.monotonic() + BUDGET_S
    for part in PARTS:
        began = time.monotonic()
        left = ends - began - (0 if part is TESTS else TESTS.usual_s)
        if size == "small" and part.name in GPU_ONLY:
            console.print(f"{part.name}: left out, {GPU_ONLY[part.name]}")
        elif part.usual_s > left:
            console.print(f"{part.name}: left out, it takes about {part.usual_s:.0f} s and {left:.0f} s are left")
        else:
            try:
                results[part.name] = run_part(part, size, environ, min(left, PATIENCE * part.usual_s))
                console.print(f"{part.name}: done in {time.monotonic() - began:.0f} s")
            except PartFailed as error:
                failures.append(f"{part.name}: {error}")
                console.print(f"{part.name}: failed after {time.monotonic() - began:.0f} s")
    return results, failures


def run_part(part: Part, size: str, environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Starts a part and returns what it left."""
    with tempfile.TemporaryDirectory() as folder:
        if part is TESTS:
            return run_tests(Path(folder, "junit.xml"), environ, limit_s)
        run_process([*part.command(size), folder, str(time.monotonic())], environ, limit_s)
        return json.loads(Path(folder, "result.json").read_text())


def run_tests(report: Path, environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Counts of `tests/gpu`."""
    run_process([sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", f"--junitxml={report}"], environ, limit_s)
    (suite,) = ElementTree.parse(report).getroot()
    ran, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return {"passed": ran - skipped, "skipped": skipped}


def run_process(command: list[str], environ: dict[str, str], limit_s: float) -> None:
    """Runs one process to its end, and leaves none of its children behind."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            end = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            end = f"not over after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if end is not None:
            log.seek(0)
            raise PartFailed("\n".join([*log.read().splitlines()[-LOG_LINES:], end]))


def check_losses(results: dict[str, dict[str, Any]], tolerance: float) -> list[str]:
    """What does not learn, or not as the first of those parts that do the same work."""
    losses = {name: losses_of(results[name]) for name in timed(results)}
    failures = [f"{name}: its loss does not fall: {of}" for name, of in losses.items() if not of[-1] < of[0]]
    same = [name for name in SAME_LOSSES if name in losses]
    for name in same[1:]:
        furthest = max(abs(x - y) / y for x, y in zip(losses[name], losses[same[0]], strict=True))
        if furthest > tolerance:
            failures.append(f"{name}: losses {losses[name]}, with {same[0]} {losses[same[0]]}: off by {furthest:.0e}")
    return failures


def mfu(results: dict[str, dict[str, Any]], name: str) -> float | None:
    """As the module's text says; None where the device's rate was not measured."""
    if "matmul" not in results:
        return None
    return results[name]["tokens_per_s"] * results[name]["flops_per_token"] / results["matmul"]["flops_per_s"]


def table(results: dict[str, dict[str, Any]]) -> Table:
    out = Table("run", "tokens/s", "MFU", "GPU GiB", "host GiB", "losses")
    for name in timed(results):
        result, share, losses = results[name], mfu(results, name), losses_of(results[name])
        out.add_row(
            name,
            f"{result['tokens_per_s']:,.0f}",
            "" if share is None else f"{share:.1%}",
            "" if result["gpu_bytes"] is None else f"{result['gpu_bytes'] / GIB:.1f}",
            f"{result['host_bytes'] / GIB:.1f}",
            f"{losses[0]:.3f} to {losses[-1]:.3f}",
        )
    return out


def timed(results: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the parts that trained."""
    return [name for name, result in results.items() if "tokens_per_s" in result]


def losses_of(result: dict[str, Any]) -> list[float]:
    """Those of the steps that fp16's loss scale did not skip."""
    return [loss for loss in result["losses"] if loss is not None]


def summary(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The numbers of the last line."""
    out = {}
    if "matmul" in results:
        out["matmul_tflops"] = results["matmul"]["flops_per_s"] / 1e12
    for name in timed(results):
        result, share = results[name], mfu(results, name)
        out[f"{name}_tokens_per_s"] = result["tokens_per_s"]
        if share is not None:
            out[f"{name}_mfu"] = share
        if result["gpu_bytes"] is not None:
            out[f"{name}_gpu_gib"] = result["gpu_bytes"] / GIB
        if "offload" in name:
            out[f"{name}_host_gib"] = result["host_bytes"] / GIB
        if "loss_scale" in result:
            out[f"{name}_loss_scale"] = result["loss_scale"]
    if {"ddp", "hf"} <= results.keys():
        out["ratio_vs_hf"] = results["ddp"]["tokens_per_s"] / results["hf"]["tokens_per_s"]
    return out | {f"tests_{key}": count for key, count in results.get("tests", {}).items()}


if __name__ == "__main__":
    main()
