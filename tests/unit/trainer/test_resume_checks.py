"""Texts about a checkpoint that belongs to another layout."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_trainer.checkpoint.folder import LAYOUT, RUN
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import CheckpointError
from ds_trainer.layout import ParameterSlice
from ds_trainer.trainer.resume_checks import check_layout, describe_layout

SLICE = ParameterSlice("a", (4,), (0, 4))


def run(pp_split):
    parallel = {"engine": "ddp", "pp": 2, "schedule": "1f1b", "pp_split": pp_split}
    return resolve(*load_config({"parallel": parallel}), Machine(2))


@pytest.mark.case("M3")
def test_another_split_of_the_layers_is_named():
    saved, now = run([1, 3]), run([2, 2])
    files = {
        LAYOUT: describe_layout(saved, [[SLICE], []]),
        RUN: saved.config.model_dump(mode="json", by_alias=True),
    }
    checkpoint = SimpleNamespace(folder=Path("checkpoint-2"), json=files.__getitem__)
    with pytest.raises(CheckpointError) as caught:
        check_layout(checkpoint, now, [], 0)
    assert "with parallel.pp_split [1, 3]; this run is " in caught.value.found
    assert caught.value.found.endswith("with parallel.pp_split [2, 2]")
