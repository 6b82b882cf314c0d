"""The fields of `TrainingArguments` that are set, and the report of the keys that they lead to. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from ds_trainer.config.foreign_files import load_foreign_config
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.interop.hf.fields import RENAMED, SWITCHES, TRAINING_ARGUMENTS
from ds_trainer.interop.import_result import Imported

_SAYS_NOTHING: tuple[Any, ...] = (None, "", [], {})

_NUMBER = "a number (in YAML 1.0e-4: it takes 1e-4 for text)"
_SECTIONS = {
    **dict.fromkeys(("lr_scheduler_kwargs", "parallelism_config"), "a mapping"),
    **dict.fromkeys(("deepspeed", "fsdp_config", "accelerator_config"), "a mapping, or the path of a file with one"),
}
"""Field that holds a mapping -> what it may hold."""


class HFImport:
    """The fields of one import, with the unified JSON and the report so far.

    Args:
        arguments: Field -> value; a field that is left out or null has its default.
        steps_per_epoch: Optimizer steps of one pass over the training data; None where the data is not known.
        folder: Where the files are looked for that fields name, before the working directory.

    Attributes:
        found: The unified JSON and the report so far.
        set_fields: Field -> value, of those that are not at their defaults.

    Raises:
        ConfigErrors: Values of a wrong type.
    """

    def __init__(self, arguments: Mapping[str, Any], steps_per_epoch: int | None = None, folder: Path = Path()) -> None:
        self.found = Imported()
        self.steps_per_epoch, self.folder = steps_per_epoch, folder
        self.set_fields: dict[str, Any] = {}
        self._written: dict[str, tuple[str, Any]] = {}
        self._at_default: dict[str, Any] = {}
        if errors := list(_wrong_types(arguments)):
            raise ConfigErrors(errors)
        for written, item in arguments.items():
            name = RENAMED.get(written, written)
            is_default = name in TRAINING_ARGUMENTS and item == TRAINING_ARGUMENTS[name].default
            is_hidden = item == f"<{name.upper()}>"  # transformers writes tokens so, set or not.
            if is_default or is_hidden or item in _SAYS_NOTHING or (written in RENAMED and not item):
                self._at_default[written] = item
                continue
            self.set_fields[name], self._written[name] = SWITCHES.get(written, item), (written, item)

    def __getitem__(self, name: str) -> Any:
        """A field's value, or its default."""
        return self.set_fields.get(name, TRAINING_ARGUMENTS[name].default)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None where it depends on the data."""
        if self["max_steps"] > 0:
            return int(self["max_steps"])
        return None if self.steps_per_epoch is None else math.ceil(self["num_train_epochs"] * self.steps_per_epoch)

    def section(self, name: str) -> dict[str, Any] | None:
        """A field that holds a mapping or the path of a file with one; None where it is not set.

        Raises:
            ConfigError: The file cannot be read.
        """
        item = self[name]
        if not isinstance(item, str | Path):
            return item or None
        beside = self.folder / item
        return load_foreign_config(beside if beside.exists() else Path(item))

    def holds(self, name: str) -> bool:
        """Whether a field is written, even with its default."""
        return name in self.set_fields or self._at_default.get(name) not in _SAYS_NOTHING

    def carry(self, name: str, ours: dict[str, Any], note: str = "", changed: bool = False) -> None:
        """Reports that a field led to our keys; one that was left out, by its default."""
        if self.holds(name):
            self.found.carry(*self._shown(name), ours, note, changed)
        else:
            usual = f"transformers' default: {TRAINING_ARGUMENTS[name].default}"
            self.found.carry(name, None, ours, f"{usual}; {note}" if note else usual, changed)

    def drop(self, name: str, note: str) -> None:
        """Reports that a field cannot be carried, if it is written."""
        if self.holds(name):
            self.found.drop(*self._shown(name), note)

    def carry_defaults(self) -> None:
        """Adds the lines of fields that are written with their defaults and have led to no key."""
        reported = {line.key for line in self.found.lines}
        for written, item in self._at_default.items():
            if written not in reported and item is not None:
                self.found.carry(written, item, {}, "the default: nothing is lost")

    def _shown(self, name: str) -> tuple[str, Any]:
        """Name and value for the report, which may end up in a log; a DeepSpeed JSON's keys have their own lines."""
        written, item = self._written.get(name, (name, self._at_default.get(name)))
        if name.endswith("_token"):
            item = f"<{name.upper()}>"
        return written, "{...}" if name == "deepspeed" and isinstance(item, dict) else item


def _wrong_types(arguments: Mapping[str, Any]) -> Iterator[ConfigError]:
    for written, item in arguments.items():
        name = RENAMED.get(written, written)
        takes = "" if item is None or name not in TRAINING_ARGUMENTS else _takes(written, name, item)
        if takes:
            yield ConfigError(
                f"{written} is {item!r}", f"TrainingArguments.{name} is {takes}", f"write {written} so, or remove it"
            )


def _takes(written: str, name: str, item: Any) -> str:
    """What a field takes, if that is something else."""
    usual = TRAINING_ARGUMENTS[name].default
    if name in _SECTIONS:
        is_path = isinstance(item, str | Path) and "path" in _SECTIONS[name]
        return "" if is_path or isinstance(item, Mapping) else _SECTIONS[name]
    if isinstance(usual, bool) or written in SWITCHES:
        return "" if isinstance(item, bool) else "true or false"
    if isinstance(usual, int | float):
        return "" if isinstance(item, Real) and not isinstance(item, bool) else _NUMBER
    return ""
