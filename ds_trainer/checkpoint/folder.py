"""Folders of checkpoints: their names and manifests; commits, finds, verifies and removes them. No torch.

A folder named `checkpoint-<step>` is complete: one rename gives it that name, after all of its files, the manifest
last, are on the disk. The manifest holds size and SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ds_trainer.files import size_fault, sync

MANIFEST = "manifest.json"
STATE, RUN, LAYOUT = "trainer_state.json", "run.json", "layout.json"
FORMAT = 1
TRIAL = ".trial-"
"""Prefix of the folder names of trial saves."""
_NAME = re.compile(r"checkpoint-(\d+)")


def folder_of(output_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return output_dir / f"checkpoint-{step}"


def rank_file(rank: int) -> str:
    """Name of the file of a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def checkpoints(output_dir: Path) -> list[Path]:
    """All checkpoints of a run, newest first; not verified."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def fingerprint(path: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def commit(partial: Path, folder: Path, files: dict[str, dict[str, int | str]]) -> None:
    """Writes the manifest and gives the folder its name.

    Args:
        partial: Folder whose files are all written and on the disk.
        folder: Its name from now on; one of that name is replaced.
        files: Fingerprint of every file by its path within the folder, in POSIX form.
    """
    manifest = {"format": FORMAT, "step": step_of(folder), "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(partial / MANIFEST)
    for path in {partial, *(path for path in partial.rglob("*") if path.is_dir())}:
        sync(path)
    replaced = _rename_removed(folder) if folder.exists() else None
    partial.rename(folder)
    sync(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def remove(folder: Path) -> None:
    """Removes a checkpoint; renamed first, so that a killed removal leaves no damaged checkpoint."""
    shutil.rmtree(_rename_removed(folder))


def _rename_removed(folder: Path) -> Path:
    removed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    return folder.rename(removed)


def rotate(output_dir: Path, keep_last: int, keep: str | None) -> None:
    """Removes checkpoints beyond the newest `keep_last`.

    Args:
        output_dir: The run's folder.
        keep_last: How many are kept.
        keep: Name of another one to keep, such as the best.
    """
    for folder in checkpoints(output_dir)[keep_last:]:
        if folder.name != keep:
            remove(folder)


def remove_unfinished_saves(output_dir: Path) -> None:
    """Removes the folders that killed saves, removals and trial saves left behind."""
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.removed", f"{TRIAL}*"):
        for path in output_dir.glob(pattern):
            shutil.rmtree(path)


def manifest_faults(folder: Path) -> tuple[dict[str, dict], list[str]]:
    """The files that a checkpoint's manifest lists, and the faults of the manifest itself, as text."""
    path = folder / MANIFEST
    if not folder.is_dir():
        return {}, [f"{folder} is a file" if folder.exists() else f"{folder} does not exist"]
    if not path.exists():
        return {}, [f"{path} is missing{_looks_like(folder)}"]
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{path} cannot be read ({error})"]
    keys = ("format", "step", "files")
    if not isinstance(manifest, dict) or set(keys) - set(manifest) or not isinstance(manifest["files"], dict):
        return {}, [f"{path} is no manifest, which has {', '.join(keys)}"]
    found, step, files = (manifest[key] for key in keys)
    if found != FORMAT:
        return {}, [f"{path} is of format {found}, this version reads {FORMAT}"]
    if _NAME.fullmatch(folder.name) and step != step_of(folder):
        return {}, [f"{path} belongs to step {step}"]
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside or not files:
        return {}, [f"{path} lists {', '.join(outside) or 'no files'}"]
    return files, []


def _looks_like(folder: Path) -> str:
    """What a folder that is not a checkpoint seems to be, as text for an error; empty if unknown."""
    if inside := checkpoints(folder):
        return f"; the folder holds {', '.join(path.name for path in inside)}: name one of them"
    if (folder / "latest").exists() or any(folder.glob("global_step*")):
        return "; it looks like a checkpoint of DeepSpeed, which is pickled and is not read"
    if (folder / "config.json").exists():
        return "; it looks like a Hugging Face folder, which belongs in model.path"
    return ""


def file_faults(folder: Path, files: dict[str, dict], names: Iterable[str]) -> list[str]:
    """Faults of the named files of a checkpoint, as text."""
    return [fault for name in names if (fault := _fault(folder / name, files[name]))]


def _fault(path: Path, expected: dict) -> str | None:
    try:
        if fault := size_fault(path, expected["bytes"]):
            return fault
        if fingerprint(path)["sha256"] != expected["sha256"]:
            return f"{path} has another SHA-256 than when it was written"
    except (OSError, KeyError, TypeError) as error:
        return f"{path} cannot be verified ({error})"
    return None
