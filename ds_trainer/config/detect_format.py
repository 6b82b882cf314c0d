"""Which tool a config file belongs to, by its keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.config.foreign_files import load_foreign_config
from ds_trainer.errors import ConfigError

FORMATS = {"accelerate": "an accelerate YAML", "hf": "TrainingArguments", "deepspeed": "a DeepSpeed JSON"}
"""Format -> what error texts call a file of it."""

_MARKS = {
    "accelerate": ("distributed_type", "compute_environment"),
    "hf": ("output_dir", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"),
    "deepspeed": ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"),
}
"""Format -> keys that show it. TrainingArguments have train_batch_size too, and so come before DeepSpeed."""


def detect_format(content: Mapping[str, Any], expected: str | None = None) -> str | None:
    """The format that a config's keys show; None where they show none.

    Args:
        content: The config.
        expected: The format that the user says it has, which is the answer if any key shows it.
    """
    shown = [name for name, marks in _MARKS.items() if any(mark in content for mark in marks)]
    return expected if expected in shown else next(iter(shown), None)


def detect_format_of_file(path: Path) -> str | None:
    """As `detect_format`; None too where the file cannot be read."""
    try:
        return detect_format(load_foreign_config(path))
    except ConfigError:
        return None
