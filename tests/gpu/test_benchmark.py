"""The GPU benchmark's rehearsal on the CPU: the whole script, with tiny models."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_of_the_gpu_benchmark_measures_every_part():
    end = subprocess.run([sys.executable, "benchmarks/gpu.py", "--small"], cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 0, end.stdout + end.stderr
    numbers = dict(item.split("=") for item in end.stdout.splitlines()[-1].split())
    trained = ("hf", "ddp", "fsdp2", "zero1", "zero2", "zero3_offload", "fsdp2_offload", "whole_loss", "chunked_loss")
    for name in (
        "matmul_tflops",
        "ratio_vs_hf",
        *(f"{name}_{what}" for name in trained for what in ("tokens_per_s", "mfu")),
    ):
        assert float(numbers[name]) > 0, name
    assert int(numbers["tests_passed"]) + int(numbers["tests_skipped"]) > 0
