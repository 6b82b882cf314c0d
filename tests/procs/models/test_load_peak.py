"""Host memory while a checkpoint is loaded: under ZeRO-3 and FSDP2 no rank ever holds the whole model."""

from __future__ import annotations

import shutil
from itertools import product
from math import prod
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.rss import rss_anon_peak
from tests.helpers.runs import make_trainer
from tests.helpers.tiers import tiers


class Loaded(Exception):
    """The last weight is in place and there is no optimizer yet."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a fp32 checkpoint of 210M parameters in tensors of at most 1.4% of it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=4096,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    assert sum(map(prod, shapes.values())) > 200e6
    random = np.random.default_rng(0)
    tensors = {name: random.random(shape, dtype=np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    yield folder
    shutil.rmtree(folder)


def load_peak(out: Path, checkpoint: Path, engine: str, tp: int = 1) -> float:
    """Peak of this rank's anonymous memory above that before the run, as a share of the fp32 model."""
    from ds_trainer.trainer import setup

    batch = {"micro_size": None, "accumulation": 1}
    stop = patch.object(setup, "make_optimizer", side_effect=Loaded)
    with stop, rss_anon_peak() as peak, pytest.raises(Loaded):
        make_trainer(engine, out, model=checkpoint, batch=batch, parallel={"tp": tp})
    return peak.bytes / (checkpoint / "model.safetensors").stat().st_size


@pytest.mark.case("E1", "E2")
@pytest.mark.parametrize(
    ("engine", "ranks"), tiers(product(["zero3", "fsdp2"], [2, 4]), slow=[("fsdp2", 4), ("zero3", 2)])
)
def test_no_rank_holds_more_than_its_share_of_a_cut_model(world, tmp_path, checkpoint, engine, ranks):
    limit = {2: 0.75, 4: 0.45}[ranks]
    peaks = world(load_peak, ranks, tmp_path, checkpoint, engine)
    assert all(1 / ranks <= peak < limit for peak in peaks), peaks


@pytest.mark.case("E1")
@pytest.mark.parametrize("engine", tiers(["zero0", "zero1", "zero2"], slow=["zero1", "zero2"]))
def test_a_replicated_model_is_held_once_by_each_rank_while_it_is_loaded(world, tmp_path, checkpoint, engine):
    peaks = world(load_peak, 2, tmp_path, checkpoint, engine)
    assert all(1 <= peak < 1.1 for peak in peaks), peaks


@pytest.mark.case("E1")
@pytest.mark.parametrize(
    ("engine", "ranks", "share", "limit"),
    [
        ("ddp", 2, 1 / 2, 0.56),
        pytest.param("zero2", 2, 1 / 2, 0.56, marks=pytest.mark.slow),
        pytest.param("zero3", 4, 1 / 4, 0.35, marks=pytest.mark.slow),
        pytest.param("fsdp2", 4, 1 / 4, 0.35, marks=pytest.mark.slow),
    ],
)
def test_a_tensor_rank_holds_no_more_than_its_part(world, tmp_path, checkpoint, engine, ranks, share, limit):
    peaks = world(load_peak, ranks, tmp_path, checkpoint, engine, 2)
    assert all(share <= peak < limit for peak in peaks), peaks
