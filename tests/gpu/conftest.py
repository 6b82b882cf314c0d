"""Runs functions in one process that has the GPU: rank 0 of 1, over NCCL.

Not in pytest's own process, whose group and DeepSpeed are a CPU's; and not forked, which CUDA forbids.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

TIMEOUT_S = 120.0


@pytest.fixture(scope="session")
def gpu():
    """`gpu(function, *args)` returns what a module-level function returns there."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda function, *args: process.submit(function, *args).result(TIMEOUT_S)
