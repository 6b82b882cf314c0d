"""Checkpoints of a run, verified against their manifest before anything of them is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ds_trainer.checkpoint.folder import checkpoints, file_faults, manifest_faults, rank_file
from ds_trainer.checkpoint.save import RankState
from ds_trainer.checkpoint.shard_reader import ShardReader, reading
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import CheckpointError
from ds_trainer.log import get_logger


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files are verified.

    Args:
        folder: Where it is.
    """

    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        """One of its JSON files."""
        with reading(self.folder):
            return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def shards(self) -> ShardReader:
        """Its masters and optimizer states."""
        return ShardReader(self.folder)

    def rank_state(self, rank: int) -> RankState:
        """What belongs to one rank."""
        with reading(self.folder), safe_open(self.folder / rank_file(rank), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
            return RankState(tensors, json.loads(file.metadata()["rest"]))


def open_newest(output_dir: Path, mesh: Mesh) -> VerifiedCheckpoint | None:
    """The newest whole checkpoint of a run; says what it skips. A collective.

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
    """One checkpoint. A collective.

    Args:
        folder: The checkpoint.
        mesh: Process groups; None: this process is alone.

    Raises:
        CheckpointError: On every rank: it is not whole.
    """
    faults = _faults(folder, mesh)
    if faults:
        error = CheckpointError(
            f"{folder} is no whole checkpoint: {'; '.join(faults)}",
            "every file of a checkpoint is what its manifest says",
            "name another checkpoint; checkpoint.resume = auto takes the newest whole one",
        )
        error.on_all_ranks = True
        raise error
    return VerifiedCheckpoint(folder)


def _faults(folder: Path, mesh: Mesh | None) -> list[str]:
    """What is wrong with a checkpoint, the same list on every rank; each of them reads a share of the files."""
    files, faults = manifest_faults(folder)
    size = sum(entry.get("bytes", 0) for entry in files.values() if isinstance(entry, dict))
    if size > 1e9:
        get_logger().info("verifying %s (%.1f GB)", folder, size / 1e9)
    if mesh is None:
        return faults + file_faults(folder, files, files)
    share = list(files)[mesh.grid.rank :: mesh.grid.world]
    everyone = mesh.gather_over_world(faults + file_faults(folder, files, share))
    return list(dict.fromkeys(fault for of_rank in everyone for fault in of_rank))
