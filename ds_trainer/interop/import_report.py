"""The report of an import as text: a line for every key of the file, and a count of their outcomes. Pure."""

from __future__ import annotations

import json
from textwrap import TextWrapper
from typing import get_args

from ds_trainer.interop.import_result import LAUNCHERS, Imported, ImportLine, Outcome

_Row = tuple[str, str, str, str]
"""Outcome, key and value, keys here, note."""

_INDENT = "    "
_WIDEST = 72
"""Most characters to which columns are aligned; a longer cell shifts its own line only."""


def report(found: Imported, width: int | None = None) -> str:
    """`outcome  key = value -> keys here  note` line by line, aligned, and a last line with counts.

    The launcher's keys share one line: they do not affect the training.

    Args:
        found: The import.
        width: Columns of the terminal; where the lines do not fit, notes stand below them. None: any length.
    """
    launchers = [line for line in found.lines if line.note == LAUNCHERS]
    lines = [line for line in found.lines if line.note != LAUNCHERS]
    rows: list[_Row] = [(line.outcome, _file_side(line), ", ".join(line.ours) or "-", line.note) for line in lines]
    texts = _aligned(rows)
    if width is not None and any(len(text) > width for text in texts):
        texts = [_with_note_below(*row, width) for row in rows]
    counts = [f"{sum(line.outcome == outcome for line in lines)} {outcome}" for outcome in get_args(Outcome)]
    if launchers:
        named = f"the launcher's: {', '.join(map(_file_side, launchers))}: {LAUNCHERS}"
        texts.append(named if width is None else _wrapped(named, width))
        counts.append(f"{len(launchers)} the launcher's")
    return "\n".join([*texts, ", ".join(counts)])


def _aligned(rows: list[_Row]) -> list[str]:
    widths = [min(max((len(row[column]) for row in rows), default=0), _WIDEST) for column in range(3)]
    return [
        f"{outcome:<{widths[0]}}  {file_side:<{widths[1]}}  -> {ours:<{widths[2]}}  {note}".rstrip()
        for outcome, file_side, ours, note in rows
    ]


def _with_note_below(outcome: str, file_side: str, ours: str, note: str, width: int) -> str:
    head = _wrapped(f"{outcome} {file_side} -> {ours}", width)
    return f"{head}\n{_wrapped(note, width, _INDENT)}" if note else head


def _wrapped(text: str, width: int, first: str = "") -> str:
    """Text in lines of a width, the later ones indented; words such as paths and keys are not broken."""
    wrapper = TextWrapper(
        width, initial_indent=first, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text)


def _file_side(line: ImportLine) -> str:
    return f"{line.key} (left out)" if line.value is None else f"{line.key} = {json.dumps(line.value, default=str)}"
