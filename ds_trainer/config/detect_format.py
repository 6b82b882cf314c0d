"""Whose config a file is, told by its keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.config.foreign_files import load_native
from ds_trainer.errors import ConfigError

NAMES = {"accelerate": "an accelerate YAML", "hf": "TrainingArguments", "deepspeed": "a DeepSpeed JSON"}
"""Kind of file -> what to call one."""

_MARKS = {
    "accelerate": ("distributed_type", "compute_environment"),
    "hf": ("output_dir", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"),
    "deepspeed": ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"),
}
"""Kind -> keys that show it. TrainingArguments write train_batch_size too, and so come before DeepSpeed."""


def kind_of(native: Mapping[str, Any], asked: str | None = None) -> str | None:
    """The kind that a config's keys show; None where they show none.

    Args:
        native: The config.
        asked: The kind that it is said to be, which is the answer where any key shows it.
    """
    shown = [kind for kind, marks in _MARKS.items() if any(mark in native for mark in marks)]
    return asked if asked in shown else next(iter(shown), None)


def kind_of_file(path: Path) -> str | None:
    """As `kind_of`; None too where the file cannot be read."""
    try:
        return kind_of(load_native(path))
    except ConfigError:
        return None
