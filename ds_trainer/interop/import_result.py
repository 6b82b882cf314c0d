"""The result of importing another tool's config: the unified JSON, and the outcome of every key of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_trainer.config.keys import assign

Outcome = Literal["carried", "changed", "dropped"]

LAUNCHERS = "give them to `ds-trainer train --nproc`, torchrun or accelerate launch"
"""Note of a key that is about starting ranks, and not about the training."""


@dataclass(frozen=True)
class ImportLine:
    """The outcome of one key of the file.

    Args:
        key: The file's dotted key.
        value: Its value there.
        outcome: `carried`: means the same here. `changed`: carried, but `note` says what differs. `dropped`: cannot be
            carried; `note` says why and what to do.
        ours: Dotted keys here that it led to.
        note: One line of explanation, or empty.
    """

    key: str
    value: Any
    outcome: Outcome
    ours: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Imported:
    """The unified JSON of an import so far, with its report.

    Args:
        tree: The unified JSON so far.
        lines: One line for every key that was read.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    lines: list[ImportLine] = field(default_factory=list)

    def carry(self, key: str, value: Any, ours: dict[str, Any], note: str = "", changed: bool = False) -> None:
        """Sets our keys, and reports that a key of the file led to them.

        Args:
            key: The file's dotted key.
            value: Its value there.
            ours: Our dotted key -> value.
            note: One line of explanation.
            changed: Whether it means something else here.
        """
        for name, item in ours.items():
            assign(self.tree, name, item)
        self.lines.append(ImportLine(key, value, "changed" if changed else "carried", tuple(ours), note))

    def keep(self, key: str, ours: dict[str, Any], note: str, changed: bool = False) -> None:
        """Sets our keys to the other tool's default for a key that its file lacks; the line has no value.

        Args:
            key: The key that the file could have had.
            ours: Our dotted key -> value.
            note: One line of explanation.
            changed: Whether it means something else here.
        """
        self.lines = [line for line in self.lines if line.key != key]  # a line for a null
        self.carry(key, None, ours, note, changed)

    def drop(self, key: str, value: Any, note: str) -> None:
        """Reports that a key of the file cannot be carried, and why."""
        self.lines.append(ImportLine(key, value, "dropped", (), note))

    def of(self, outcome: Outcome) -> Iterator[ImportLine]:
        """The lines of one outcome."""
        return (line for line in self.lines if line.outcome == outcome)
