"""The fields of a `TrainingArguments` that say something, and the report of what they lead to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.config.hf.hf_keys import FIELDS, RENAMED
from ds_trainer.config.imported import Imported

_SAYS_NOTHING: tuple[Any, ...] = (None, "", [], {})


class HFImport:
    """An import in the making.

    Args:
        arguments: Field -> value; a field that is left out or at its default has that default.

    Attributes:
        found: The unified JSON and the report so far.
        asked: Field -> value, of those that are not at their defaults.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.found = Imported()
        self._written: dict[str, str] = {}
        self.asked: dict[str, Any] = {}
        for written, item in arguments.items():
            name = RENAMED.get(written, written)
            is_default = name in FIELDS and item == FIELDS[name].default
            if is_default or item in _SAYS_NOTHING or (written in RENAMED and not item):
                continue
            self.asked[name], self._written[name] = item, written

    def __getitem__(self, name: str) -> Any:
        """A field's value, its default where nothing was said."""
        return self.asked.get(name, FIELDS[name].default)

    def carry(self, name: str, ours: dict[str, Any], note: str = "", changed: bool = False) -> None:
        """Reports that a field led to our keys; one that was left out, by its default."""
        if name in self.asked:
            self.found.carry(self._written[name], self._shown(name), ours, note, changed)
        else:
            usual = f"transformers' default: {FIELDS[name].default}"
            self.found.carry(name, None, ours, f"{usual}; {note}" if note else usual, changed)

    def drop(self, name: str, note: str) -> None:
        """Reports that a field cannot be carried, if it was asked for."""
        if name in self.asked:
            self.found.drop(self._written[name], self._shown(name), note)

    def _shown(self, name: str) -> Any:
        """The value for the report, which may end up in a log; keys of a DeepSpeed JSON have lines of their own."""
        if name.endswith("_token"):
            return f"<{name.upper()}>"
        return "{...}" if name == "deepspeed" and isinstance(self.asked[name], dict) else self.asked[name]
