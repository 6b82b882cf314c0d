"""The report of an import as text: a line for every key of the file, and a count of their fates. Pure."""

from __future__ import annotations

import json
from textwrap import fill
from typing import get_args

from ds_trainer.config.imported import LAUNCHERS, Fate, Imported, Line

_WIDEST = 72
"""Characters to which the columns are aligned; a longer cell pushes its own line only."""


def report(found: Imported, width: int | None = None) -> str:
    """`fate  key = value -> keys here  note` line by line, aligned, and a last line that counts.

    What is the launcher's stands in one line of its own: nothing of the training is lost with it.

    Args:
        found: The import.
        width: Columns of the terminal; where the lines do not fit, notes stand below them. None: any length.
    """
    launchers = [line for line in found.lines if line.note == LAUNCHERS]
    lines = [line for line in found.lines if line.note != LAUNCHERS]
    rows = [(line.fate, _file_side(line), ", ".join(line.ours) or "-", line.note) for line in lines]
    texts = _aligned(rows)
    if width is not None and any(len(text) > width for text in texts):
        texts = [_with_note_below(*row, width) for row in rows]
    counts = [f"{sum(line.fate == fate for line in lines)} {fate}" for fate in get_args(Fate)]
    if launchers:
        named = f"the launcher's: {', '.join(map(_file_side, launchers))}: {LAUNCHERS}"
        texts.append(named if width is None else fill(named, width, subsequent_indent="  "))
        counts.append(f"{len(launchers)} the launcher's")
    return "\n".join([*texts, ", ".join(counts)])


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[str]:
    widths = [min(max((len(row[column]) for row in rows), default=0), _WIDEST) for column in range(3)]
    return [
        f"{fate:<{widths[0]}}  {file_side:<{widths[1]}}  -> {ours:<{widths[2]}}  {note}".rstrip()
        for fate, file_side, ours, note in rows
    ]


def _with_note_below(fate: str, file_side: str, ours: str, note: str, width: int) -> str:
    head = fill(f"{fate} {file_side} -> {ours}", width, subsequent_indent="    ")
    return f"{head}\n{fill(note, width, initial_indent='    ', subsequent_indent='    ')}" if note else head


def _file_side(line: Line) -> str:
    return f"{line.key} (left out)" if line.value is None else f"{line.key} = {json.dumps(line.value, default=str)}"
