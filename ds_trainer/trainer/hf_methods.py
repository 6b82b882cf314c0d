"""Small methods of the Trainer that transformers' has: its callbacks, and what scripts print and write at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.hf import adapted, take_out
from ds_trainer.callbacks.view import TrainerView
from ds_trainer.files import replace_text
from ds_trainer.log import get_logger


class HasCallbacks(TrainerView, Protocol):
    """A trainer, which these methods belong to."""

    callbacks: list[Callback]


def model(trainer: TrainerView) -> Any:
    """The bare module: this rank's shard of the model."""
    return trainer.run.model


def processing_class(trainer: TrainerView) -> Any:
    """The run's tokenizer; None: it has none."""
    return trainer.run.tokenizer


def optimizer(trainer: TrainerView) -> Any:
    """The live optimizer's `param_groups`; its states are sharded differently on every engine."""
    return SimpleNamespace(param_groups=trainer.engine.param_groups())


class RankFlag(int):
    """Whether this is a certain rank: true or false as it stands, and when it is called, as in transformers."""

    def __call__(self) -> bool:
        """Whether it is that rank."""
        return bool(self)


def add_callback(trainer: HasCallbacks, callback: Any) -> None:
    """Adds a callback, or a class of transformers' kind, after the others. Every rank must call it."""
    for added in adapted([callback]):
        trainer.callbacks.append(added)
        added.on_init_end(trainer)


def pop_callback(trainer: HasCallbacks, callback: Any) -> Any:
    """Takes out a callback, or the first of a class, and returns it; None: there is none."""
    return take_out(trainer.callbacks, callback)


def remove_callback(trainer: HasCallbacks, callback: Any) -> None:
    """Takes out a callback, or the first of a class, if there is one."""
    take_out(trainer.callbacks, callback)


def log_metrics(trainer: HasCallbacks, split: str, metrics: Mapping[str, Any]) -> None:
    """Logs metrics on rank 0, one a line, below the name of their data."""
    if trainer.is_world_process_zero:
        width = max(map(len, metrics), default=0)
        lines = [f"  {name:<{width}} = {value}" for name, value in sorted(metrics.items())]
        get_logger().info("%s", "\n".join([f"{split} metrics", *lines]))


def save_metrics(trainer: HasCallbacks, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
    """Writes `<split>_results.json` in the output folder, on rank 0.

    Args:
        trainer: The trainer.
        split: Name of the data, such as "train" or "eval"; "all" writes `all_results.json` only.
        metrics: The metrics.
        combined: Whether they are added to `all_results.json`.
    """
    if not trainer.is_world_process_zero:
        return
    folder = Path(trainer.config.run.output_dir)
    _write(folder / f"{split}_results.json", metrics)
    everything = folder / "all_results.json"
    if combined and split != "all":
        before = json.loads(everything.read_text(encoding="utf-8")) if everything.exists() else {}
        _write(everything, before | dict(metrics))


def save_state(trainer: HasCallbacks) -> None:
    """Writes `trainer_state.json` in the output folder, on rank 0; a checkpoint does not need it."""
    if trainer.is_world_process_zero:
        _write(Path(trainer.config.run.output_dir) / "trainer_state.json", trainer.state.state_dict())


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, indent=4, sort_keys=True) + "\n")
