"""Files that outlive a killed process: written aside and renamed, synced, checked by their size. Pure.

A rename within a folder happens completely or not at all. What is written under `partial_path` first therefore has its
final name only once it is complete, and what had that name before stays until then.
"""

from __future__ import annotations

import os
from pathlib import Path


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


def replace_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8 aside and renames it into place, over one of that name; not synced.

    Raises:
        OSError: It cannot be written; a file of that name is as before.
    """
    aside = partial_path(path)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def apply_umask(path: Path) -> None:
    """Gives a file the mode of one that `open` makes; safetensors gives its files to their owner alone."""
    umask = os.umask(0o077)  # There is no way to read it without setting it.
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_fault(path: Path, expected_bytes: int) -> str | None:
    """What differs from the size that a manifest gives for a file, as text; None: nothing does."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    return None if size == expected_bytes else f"{path} has {size:,} bytes instead of {expected_bytes:,}"
