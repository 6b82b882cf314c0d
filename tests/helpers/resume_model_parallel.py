"""Runs of models split over ranks, their checkpoints, and runs that go on from these."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ds_trainer.errors import CheckpointError
from tests.helpers.layouts import CELLS
from tests.helpers.resume import state_hash
from tests.helpers.runs import make_trainer, weights
from tests.helpers.tiny import samples

ADAMW = {"name": "adamw", "lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
ROWS = samples(16)
SAVED, STEPS = 2, 4


def train(out: Path, model: str, cell: str, keys: dict, checkpoint: dict, batch: dict | None = None):
    """Trains to the fourth step; the log of its losses, a hash of weights and states, and the weights."""
    sections = CELLS[cell] | {"parallel": CELLS[cell].get("parallel", {}) | keys}
    trainer = make_trainer(
        cell.split("-")[0],
        out,
        model=model,
        rows=ROWS,
        optimizer=ADAMW,
        batch=batch or {"global_size": 8, "micro_size": 2},
        data={"shuffle": True},
        run={"max_steps": STEPS},
        checkpoint={"every_steps": SAVED, "keep_last": 9, "export": False} | checkpoint,
        **sections,
    )
    began = trainer.state.global_step, weights(trainer)
    trainer.train()
    losses = [line.loss for line in trainer.state.log_history]
    result = began, losses, state_hash(trainer), weights(trainer)
    trainer.close()
    return result


def check_each_element_is_saved_once(folder: Path, whole: dict[str, torch.Tensor]):
    """The boxes of each tensor of a checkpoint make it whole, without overlap, in as many bytes as it has."""
    index = json.loads((folder / "index.json").read_text())
    assert {name.removeprefix("master/") for name in index if name.startswith("master/")} == whole.keys()
    in_files = 0
    for path in folder.glob("state-*"):
        with safe_open(path, framework="pt") as file:
            in_files += sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    assert in_files == sum(prod(entry["shape"]) for entry in index.values())
    for fqn, entry in index.items():
        owners = torch.zeros(entry["shape"], dtype=torch.int)
        for box in entry["boxes"]:
            owners[tuple(slice(o, o + n) for o, n in zip(box["offsets"], box["sizes"], strict=True))] += 1
        assert (owners == 1).all(), fqn
        if owners.dim():
            assert owners.shape == whole[fqn.partition("/")[2]].shape, "the vocabulary's padding is in no file"


def refused(*args):
    """Why a run on this rank does not go on."""
    with pytest.raises(CheckpointError) as caught:
        train(*args)
    return str(caught.value)
