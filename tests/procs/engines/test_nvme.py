"""Offload to NVMe: the numbers of CPU offload bit for bit, in files that hold what they should and leave nothing."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import log
from ds_trainer.callbacks.base import Callback
from ds_trainer.config.memory_needs import memory_row
from ds_trainer.errors import EngineError, MachineError
from tests.helpers.runs import make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import tiny_llama

pytestmark = [pytest.mark.nvme, pytest.mark.case("E6")]

# Matrices of 33 x 16001 and 65 x 33 elements: shards that fill neither a block of the drive nor a word.
ODD = {
    "hidden": 33,
    "layers": 1,
    "vocab": 65,
    "intermediate": 16001,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
CASES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    # An embedding four times as large as anything else, and as the buffers that the config gives.
    "large embedding": ({"hidden": 512, "layers": 1, "vocab": 4099, "intermediate": 1100}, {}),
    "odd sizes": (ODD, {"sub_group_size": 1}),
    "odd sizes in one sub-group": (ODD, {}),
    "tiny": ({}, {}),
}
"""Shape of the model, and what its config says beyond `ZERO`."""
ZERO = {
    "stage": 3,
    "reduce_bucket_size": 600_000,
    "sub_group_size": 500_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 600_000,
    "stage3_max_reuse_distance": 0,
}
CPU = {"device": "cpu"}


class Witness(Callback):
    """Bytes in this rank's swap files before the first step and after each.

    Args:
        meet: Output folders of runs that begin their first step together.
    """

    def __init__(self, meet: tuple[Path, ...]) -> None:
        self.bytes: list[int] = []
        self.meet = meet

    def on_train_begin(self, trainer: Any) -> None:
        self.bytes.append(trainer.engine.facts().nvme_bytes)
        Path(trainer.config.run.output_dir, "ready").touch()
        deadline = time.monotonic() + 60
        while not all((folder / "ready").exists() for folder in self.meet):
            assert time.monotonic() < deadline, f"not all of {self.meet} have begun"
            time.sleep(0.05)

    def on_step_end(self, trainer: Any) -> None:
        self.bytes.append(trainer.engine.facts().nvme_bytes)


def train(out: Path, case: str, optimizer: dict, param: dict, meet: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Three steps on this rank; returns hashes of all weights and what is known of the swap files."""
    witness, (shape, zero) = Witness(meet), CASES[case]
    trainer = make_trainer(
        "zero3",
        out,
        model=tiny_llama(**shape),
        given={"callbacks": [witness]},
        optimizer={"name": "adamw", "lr": 1e-2},
        run={"max_steps": 3, "epochs": 3},
        zero={**ZERO, **zero, "offload_optimizer": optimizer, "offload_param": param},
    )
    before = hashes(trainer)
    trainer.train()
    sections = trainer.engine.native["zero_optimization"].values()
    swaps = {Path(part["nvme_path"]) for part in sections if isinstance(part, dict) and "nvme_path" in part}
    found = {
        "before": before,
        "weights": hashes(trainer),
        "bytes": witness.bytes,
        "expected": memory_row(trainer.run.resolved).nvme * sum(p.ds_numel for p in trainer.run.model.parameters()),
        "said": list(log._seen),
        "folders": {path.parts[-2] for swap in swaps for path in swap.glob("zero_stage_3/*/rank*")},
    }
    trainer.close()
    return found


def hashes(trainer: Any) -> dict[str, str]:
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in weights(trainer).items()}


def on(folder: Path) -> dict:
    return {"device": "nvme", "nvme_path": str(folder)}


@contextmanager
def small_drive(folder: Path, *options: str) -> Iterator[Path]:
    """A drive of 24 MB, mounted with these options; skips where this user cannot mount one."""
    image, mounted = folder / "drive.img", folder / "drive"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(24 * 2**20)
    mount = ["mount", "-o", ",".join(("loop", *options)), str(image), str(mounted)]
    for command in (["mkfs.ext4", "-q", str(image)], mount):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no drive can be mounted here: {getattr(error, 'stderr', error)}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def refused(out: Path, case: str, optimizer: dict, param: dict) -> str:
    """The error that ends a run on this rank before its first step."""
    with pytest.raises((EngineError, MachineError)) as caught:
        train(out, case, optimizer, param)
    return str(caught.value)


@pytest.mark.parametrize("case", tiers(["large embedding", "odd sizes"], slow=["odd sizes"]))
def test_three_runs_in_a_row_equal_cpu_offload_bit_for_bit_and_leave_nothing(world, tmp_path, nvme, case):
    (expected, _) = world(train, 2, tmp_path / "out", case, CPU, CPU)
    assert all(expected["weights"][name] != value for name, value in expected["before"].items())
    for optimizer, param in ((on(nvme), CPU), (CPU, on(nvme)), (on(nvme), on(nvme))):
        for got in world(train, 2, tmp_path / "out", case, optimizer, param):
            assert got["weights"] == expected["weights"]
            swapped = {"optimizer": optimizer, "float32params": param}
            assert got["folders"] == {name for name, section in swapped.items() if section != CPU}
        assert list(nvme.iterdir()) == []


def test_gradients_that_would_be_read_back_wrongly_are_refused(world, tmp_path, nvme):
    for error in world(refused, 2, tmp_path / "out", "odd sizes in one sub-group", on(nvme), CPU):
        assert "264017 elements per rank begins at element 2129" in error
        assert "set zero.sub_group_size to 1" in error


def test_swap_files_grow_in_the_first_step_and_then_hold_the_tables_bytes(world, tmp_path, nvme):
    for got in world(train, 2, tmp_path / "out", "large embedding", on(nvme), on(nvme)):
        assert 0 < got["bytes"][0] < 0.5 * got["bytes"][1]
        assert got["bytes"][1:] == got["bytes"][1:2] * 3
        # Tensors under 1 MiB per rank stay in memory.
        assert 0.9 * got["expected"] < got["bytes"][1] <= 1.01 * got["expected"]


@pytest.mark.slow
def test_two_runs_at_once_on_one_path_do_not_disturb_each_other(world, tmp_path, nvme):
    (expected, _) = world(train, 2, tmp_path / "out", "large embedding", CPU, CPU)
    outs = (tmp_path / "first", tmp_path / "second")
    with ThreadPoolExecutor(2) as jobs:
        runs = [jobs.submit(world, train, 2, out, "large embedding", on(nvme), on(nvme), outs) for out in outs]
        for run in runs:
            assert all(got["weights"] == expected["weights"] for got in run.result())
    assert list(nvme.iterdir()) == []


def test_a_model_too_small_for_nvme_is_said_and_trains(world, tmp_path, nvme):
    (got, _) = world(train, 2, tmp_path / "out", "tiny", on(nvme), on(nvme))
    for key in ("offload_optimizer", "offload_param"):
        assert any(f"zero.{key}.device is nvme and nothing is on NVMe" in text for text in got["said"])
    assert set(got["bytes"]) == {0}


def test_a_drive_with_too_little_room_is_refused_before_loading(world, tmp_path, nvme):
    with small_drive(tmp_path) as drive:
        for error in world(refused, 2, tmp_path / "out", "large embedding", on(drive), on(drive)):
            assert "swap files of 2 rank(s): needs about" in error and str(drive) in error
            assert "zero.offload_optimizer.nvme_path to a folder on a larger drive" in error
        assert [path.name for path in drive.iterdir()] == ["lost+found"]


def test_a_read_only_drive_is_refused_before_loading(world, tmp_path, nvme):
    with small_drive(tmp_path, "ro") as drive:
        for error in world(refused, 2, tmp_path / "out", "odd sizes", on(drive), CPU):
            assert "zero.offload_optimizer.nvme_path" in error and "Read-only file system" in error
