"""The report of an import as text: a line for every key of the file, and a count of their fates. Pure."""

from __future__ import annotations

import json
from typing import get_args

from ds_trainer.config.imported import Fate, Imported, Line

_WIDEST = 72
"""Characters to which the columns are aligned; a longer cell pushes its own line only."""


def report(found: Imported) -> str:
    """`fate  key = value -> keys here  note` line by line, aligned, and a last line that counts."""
    rows = [(line.fate, _file_side(line), ", ".join(line.ours) or "-", line.note) for line in found.lines]
    widths = [min(max((len(row[column]) for row in rows), default=0), _WIDEST) for column in range(3)]
    lines = [
        f"{fate:<{widths[0]}}  {file_side:<{widths[1]}}  -> {ours:<{widths[2]}}  {note}".rstrip()
        for fate, file_side, ours, note in rows
    ]
    counts = ", ".join(f"{len(list(found.of(fate)))} {fate}" for fate in get_args(Fate))
    return "\n".join([*lines, counts])


def _file_side(line: Line) -> str:
    return f"{line.key} (left out)" if line.value is None else f"{line.key} = {json.dumps(line.value, default=str)}"
