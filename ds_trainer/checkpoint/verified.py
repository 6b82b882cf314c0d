"""Checkpoints of a run, verified against their manifest before anything of them is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ds_trainer.checkpoint.folder import checkpoints, file_faults, manifest_faults, rank_file
from ds_trainer.checkpoint.save import RankState
from ds_trainer.checkpoint.shard_reader import ShardReader, read_errors
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import CheckpointError
from ds_trainer.log import get_logger


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files have been verified.

    Args:
        folder: The checkpoint's folder.
    """

    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        """Content of one of its JSON files."""
        with read_errors(self.folder):
            return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def shards(self) -> ShardReader:
        """Reader of its master weights and optimizer states."""
        return ShardReader(self.folder)

    def rank_state(self, rank: int) -> RankState:
        """The state of one rank that other ranks do not share."""
        with read_errors(self.folder), safe_open(self.folder / rank_file(rank), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
            return RankState(tensors, json.loads(file.metadata()["rest"]))


def open_newest(output_dir: Path, mesh: Mesh) -> VerifiedCheckpoint | None:
    """Opens the newest complete checkpoint of a run and warns of those it skips. A collective.

    Args:
        output_dir: The run's folder.
        mesh: Process groups.
    """
    for folder in mesh.gather_over_world(checkpoints(output_dir))[0]:
        faults = _faults(folder, mesh)
        if not faults:
            return VerifiedCheckpoint(folder)
        get_logger().warning("warning: %s is skipped: %s", folder, "; ".join(faults))
    return None


def open_checkpoint(folder: Path, mesh: Mesh | None) -> VerifiedCheckpoint:
    """Verifies and opens a checkpoint. A collective.

    Args:
        folder: The checkpoint.
        mesh: Process groups; None: this process is alone.

    Raises:
        CheckpointError: On every rank: a file is missing or damaged.
    """
    faults = _faults(folder, mesh)
    if faults:
        error = CheckpointError(
            f"{folder} is not a complete checkpoint: {'; '.join(faults)}",
            "every file of a checkpoint has the size and SHA-256 that its manifest lists",
            "name another checkpoint; checkpoint.resume = auto takes the newest complete one",
        )
        error.on_all_ranks = True
        raise error
    return VerifiedCheckpoint(folder)


def _faults(folder: Path, mesh: Mesh | None) -> list[str]:
    """Faults of a checkpoint, the same list on every rank; each rank verifies some of the files."""
    files, faults = manifest_faults(folder)
    size = sum(entry.get("bytes", 0) for entry in files.values() if isinstance(entry, dict))
    if size > 1e9:
        get_logger().info("verifying %s (%.1f GB)", folder, size / 1e9)
    if mesh is None:
        return faults + file_faults(folder, files, files)
    own_files = list(files)[mesh.grid.rank :: mesh.grid.world]
    all_faults = mesh.gather_over_world(faults + file_faults(folder, files, own_files))
    return list(dict.fromkeys(fault for of_rank in all_faults for fault in of_rank))
