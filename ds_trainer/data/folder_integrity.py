"""A folder that lists its files, so that one which lost part of them later is told from a whole one."""

from __future__ import annotations

import json
import os
from pathlib import Path

SIZES = "sizes.json"


def seal(folder: Path) -> None:
    """Waits until the files of a folder are on the disk, and writes down how large each is."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    (folder / SIZES).write_text(json.dumps(sizes), "utf-8")


def damage(folder: Path) -> str | None:
    """What has become of a sealed folder, in words; None: it is whole."""
    try:
        sizes = json.loads((folder / SIZES).read_text("utf-8"))
    except (FileNotFoundError, ValueError) as error:
        return f"{folder / SIZES} cannot be read ({error})"
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found is None:
            return f"{path} is missing"
        if found != size:
            return f"{path} has {found:,} bytes instead of {size:,}"
    return None
