"""Saves and opens checkpoints; both are collectives in which all ranks succeed or fail together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from ds_trainer.checkpoint.folder import (
    checkpoints,
    commit,
    file_faults,
    fingerprint,
    folder_of,
    manifest_faults,
)
from ds_trainer.checkpoint.shard_reader import StoredState, reading
from ds_trainer.checkpoint.shard_writer import INDEX, Shard, write_shards
from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import CheckpointError, MachineError
from ds_trainer.files import partial_path, sync
from ds_trainer.log import get_logger

STATE, RUN, LAYOUT = "trainer_state.json", "run.json", "layout.json"


@dataclass(frozen=True)
class RankState:
    """What belongs to one rank alone.

    Args:
        tensors: By name.
        rest: JSON beside them.
    """

    tensors: Mapping[str, torch.Tensor]
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class SharedState:
    """What is the same for all ranks, written by the first.

    Args:
        state: Where the run is: counts, metrics, loss scale.
        run: The resolved config.
        layout: Which slices every rank owns.
        write_model_files: Writes config, generation config and tokenizer into an empty folder.
    """

    state: Mapping[str, Any]
    run: Mapping[str, Any]
    layout: Mapping[str, Any]
    write_model_files: Callable[[Path], None]


def save(
    output_dir: Path, step: int, shards: Mapping[str, Shard], mine: RankState, shared: SharedState, mesh: Mesh
) -> Path:
    """Saves one checkpoint: written aside, synced, read back, and renamed into place. Every rank must call it.

    Args:
        output_dir: The run's folder, which every rank sees.
        step: Optimizer steps taken.
        shards: This rank's part of masters and optimizer states.
        mine: This rank's own state.
        shared: What is the same for all ranks; read on rank 0 only.
        mesh: Process groups.

    Returns:
        Its folder.

    Raises:
        MachineError: On every rank, if one could not write; earlier checkpoints are untouched.
    """
    folder = folder_of(output_dir, step)
    aside, is_first = partial_path(folder), mesh.grid.rank == 0
    try:
        with consensus(mesh, f"the save of {folder.name}"), _writing(folder):
            if is_first:
                _write_shared(aside, shared)
        with consensus(mesh, f"the folder of {folder.name}"):
            _require_seen(aside, mesh.grid.rank)
        _write_shards(shards, aside, mesh.grid.rank, folder)
        written: dict[str, dict[str, int | str]] = {}
        with consensus(mesh, f"the files of {folder.name}"), _writing(folder):
            _write_rank(aside, mesh.grid.rank, mine)
            names = [p.relative_to(aside).as_posix() for p in _files_of(aside, mesh.grid.rank)]
            written = {name: _verified(aside / name) for name in names}
        everyone = mesh.gather_over_world(written)
        with consensus(mesh, f"the manifest of {folder.name}"), _writing(folder):
            if is_first:
                commit(aside, folder, {name: mark for of_rank in everyone for name, mark in of_rank.items()})
    finally:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: BaseException) -> MachineError:
    return MachineError(
        f"{folder} cannot be written: {error}",
        "a checkpoint needs a writable folder with room for 12 bytes per trained parameter under AdamW; "
        "the checkpoints before are untouched",
        "free space, lower checkpoint.keep_last, or set run.output_dir to another drive",
    )


def _write_shared(aside: Path, shared: SharedState) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, content in ((STATE, shared.state), (RUN, shared.run), (LAYOUT, shared.layout)):
        (aside / name).write_text(json.dumps(content), encoding="utf-8")
    (aside / "model").mkdir()
    shared.write_model_files(aside / "model")


def _require_seen(aside: Path, rank: int) -> None:
    if not aside.is_dir():
        raise MachineError(
            f"rank {rank} does not see {aside}, which rank 0 has just made",
            "all ranks write into one folder, so nodes share its file system",
            "set run.output_dir to a folder on a drive that every node mounts",
        )


def _write_shards(shards: Mapping[str, Shard], aside: Path, rank: int, folder: Path) -> None:
    try:
        write_shards(shards, aside, rank)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        if not isinstance(cause, OSError | SafetensorError):
            raise
        failure = _cannot_write(folder, cause)
        failure.on_all_ranks = True
        raise failure from cause


def _write_rank(aside: Path, rank: int, mine: RankState) -> None:
    # A dictionary of strings is what safetensors keeps beside tensors.
    save_file(dict(mine.tensors), aside / rank_file(rank), metadata={"rest": json.dumps(mine.rest)})


def rank_file(rank: int) -> str:
    """Name of the file of a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def _files_of(aside: Path, rank: int) -> list[Path]:
    """What a rank has written; what carries no rank's number is the first one's."""
    own = [*aside.glob(f"state-{rank:05d}-*"), aside / rank_file(rank)]
    if rank == 0:  # By name: other ranks are still writing, and safetensors' temporary files come and go.
        own += [aside / name for name in (STATE, RUN, LAYOUT, INDEX)]
        own += [path for path in (aside / "model").rglob("*") if path.is_file()]
    return own


def _verified(path: Path) -> dict[str, int | str]:
    """Puts a file on the disk and reads it back."""
    sync(path)
    if path.suffix == ".safetensors" and path.parent.name != "model":
        with safe_open(path, framework="pt") as file:
            file.keys()
    return fingerprint(path)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are verified.

    Args:
        folder: Where it is.
    """

    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        """One of its JSON files."""
        with reading(self.folder):
            return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def stored(self) -> StoredState:
        """Its masters and optimizer states."""
        return StoredState(self.folder)

    def rank_state(self, rank: int) -> RankState:
        """What belongs to one rank."""
        with reading(self.folder), safe_open(self.folder / rank_file(rank), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
            return RankState(tensors, json.loads(file.metadata()["rest"]))


def open_newest(output_dir: Path, mesh: Mesh) -> Checkpoint | None:
    """The newest whole checkpoint of a run; says what it skips. A collective.

    Args:
        output_dir: The run's folder.
        mesh: Process groups.
    """
    for folder in mesh.gather_over_world(checkpoints(output_dir))[0]:
        faults = _faults(folder, mesh)
        if not faults:
            return Checkpoint(folder)
        get_logger().warning("warning: %s is skipped: %s", folder, "; ".join(faults))
    return None


def open_checkpoint(folder: Path, mesh: Mesh | None) -> Checkpoint:
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
    return Checkpoint(folder)


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
