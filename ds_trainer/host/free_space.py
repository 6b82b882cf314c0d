"""Free disk space, and the text of an error where it is too little."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to the drive of a folder."""
    return shutil.disk_usage(folder).free


def space_fault(folder: Path, needed_bytes: float) -> str | None:
    """`needs about 2.0 GB in out, 1.5 GB free`; None where it fits."""
    free = free_bytes(folder)
    return (
        None if needed_bytes <= free else f"needs about {size_text(needed_bytes)} in {folder}, {size_text(free)} free"
    )


def size_text(size_bytes: float) -> str:
    """`1.5 GB`; below 50 MB `20.0 MB`."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 5e7 else f"{size_bytes / 1e6:.1f} MB"
