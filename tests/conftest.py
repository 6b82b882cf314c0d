"""Shared by all tests: offline, one thread per process, ops in the environment's own folder."""

import os
import shutil
import signal
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"

import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.helpers")

from tests.helpers.world import World  # noqa: E402

# A shell starts background jobs with SIGINT ignored, which all processes of a test would inherit, and heed.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Ranks that are killed or that hang, launchers with a limit of time, and what is timed.
ALONE = [
    Path(__file__).parent / name
    for name in (
        "e2e/engines",
        "e2e/health",
        "e2e/launch",
        "e2e/parallel",
        "e2e/trainer",
        "gpu",
        "procs/checkpoint/test_kill.py",
        "procs/data/test_workers.py",
        "procs/distributed",
        "procs/health",
    )
]


def _runs_alone(path):
    return any(path.is_relative_to(place) for place in ALONE)


def pytest_ignore_collect(collection_path, config):
    """Imports no file of which nothing is asked for: importing all takes as long as some tests."""
    only_alone = collection_path.suffix == ".py" and config.option.markexpr.endswith(" and alone")
    if only_alone and not _runs_alone(collection_path) and "mark.alone" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks what no other test may run beside."""
    for item in items:
        if _runs_alone(item.path):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def world():
    """Runs module-level functions on ranks: `world(function, 2, *args)` returns one result per rank."""
    runner = World()
    yield runner
    runner.close()


@pytest.fixture
def nvme(tmp_path):
    """Folder that stands for a drive; skipped where DeepSpeed's file I/O cannot be built."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("libaio is missing (Debian: libaio-dev)")
    folder = tmp_path / "nvme"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
