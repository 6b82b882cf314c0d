"""What is wrong with files that `data.train` and `data.eval` name, as far as it shows without reading them. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".parquet")
"""Ends of the names of data files, in small letters; a name may have large ones."""

_FIRST_RECORD_BYTES = 2**20


def file_fault(key: str, path: Path) -> tuple[str, str, str] | None:
    """Found, rule and change of a data file that cannot be one; None: it can.

    Args:
        key: The config's key that names it.
        path: The file.
    """
    if path.is_dir():
        inside = sorted(str(file) for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        return (
            f"{key}: {path} is a folder" + (f" with {_named(inside)}" if inside else " without data files"),
            f"{key} names data files: {', '.join(SUFFIXES)}",
            f"set {key} to {json.dumps(inside[:3])[:-1]}{', ...' if len(inside) > 3 else ''}]"
            if inside
            else f"set {key} to a file, or to a list of files",
        )
    if not path.is_file():
        return (
            f"{key}: no file {path} ({os.path.abspath(path)})",
            "every data file must exist; paths are relative to the working directory",
            f"correct the path in {key}",
        )
    if path.suffix.lower() not in SUFFIXES:
        return (
            f"{key}: {path} ends in {path.suffix!r}",
            f"data files are {', '.join(SUFFIXES)}",
            "convert the file, or load it with `datasets` and give Trainer(train_dataset=...)",
        )
    return None


def first_keys(path: Path) -> set[str]:
    """Keys of a data file's first record; empty where they do not show at the beginning of the file."""
    if path.suffix.lower() == ".parquet":
        return set()
    with path.open("rb") as file:
        text = file.read(_FIRST_RECORD_BYTES).decode("utf-8-sig", errors="replace").lstrip(" \t\r\n[")
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # Reported with its line when the data is read.
        return set()
    return {name for name, item in record.items() if item is not None} if isinstance(record, dict) else set()


def _named(files: Sequence[str]) -> str:
    more = len(files) - 3
    return ", ".join(files[:3]) + (f" and {more} more" if more > 0 else "")
