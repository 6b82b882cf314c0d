"""Small runs of the real Trainer on TINY and its eight samples, on any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_trainer.data.collate import pad_collate
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.tiers import tiers
from tests.helpers.tiny import samples, tiny_llama

ENGINES: dict[str, dict] = {
    "ddp": {"parallel": {"engine": "ddp"}},
    "zero0": {"zero": {"stage": 0}},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "fsdp2": {"parallel": {"engine": "fsdp2"}},
}
EACH_ENGINE = tiers(ENGINES, quick=("zero3", "fsdp2"))
"""Of a test: the others run in `make test-all`."""
SGD = {"name": "sgd", "lr": 1.0, "max_grad_norm": 0.0}
"""The weights after one step are the initial ones less the gradient."""
D8 = samples(8)


def collate(features: list[dict]) -> dict[str, torch.Tensor]:
    """Pads with 0."""
    return pad_collate(features, 0)


def run_config(engine: str, out: Path, **sections: dict) -> dict:
    """One step over 8 samples in their order, in fp32, without clipping; `sections` are laid over it, key by key."""
    base: dict[str, dict] = {
        "batch": {"global_size": 8, "micro_size": 2},
        "data": {"shuffle": False},
        "optimizer": SGD,
        "schedule": {"name": "constant"},
        "precision": {"dtype": "fp32"},
        "run": {"max_steps": 1, "output_dir": str(out), "device": "cpu"},
        "checkpoint": {"export": False},
        "logging": {"plots": False, "progress_bar": False},
        **ENGINES[engine],
    }
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}


def make_trainer(engine: str, out: Path, *, model: Any = None, rows: Any = None, given: Any = None, **sections: dict):
    """A Trainer of TINY on D8.

    Args:
        engine: A key of `ENGINES`.
        out: Output folder.
        model: Instead of TINY.
        rows: Instead of D8.
        given: More arguments of `Trainer`.
        sections: Sections of the config.
    """
    return Trainer(
        model=tiny_llama() if model is None else model,
        config=run_config(engine, out, **sections),
        **{"train_dataset": D8 if rows is None else rows, "data_collator": collate} | (given or {}),
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter, whole; a collective."""
    return {name: value.float().clone() for name, value in trainer.engine.full_parameters()}


def largest_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models' tensors, each as a share of its tensor's largest element."""
    assert got.keys() == expected.keys()
    return max(((got[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)
