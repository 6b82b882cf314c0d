"""Saves checkpoints: a collective in which all ranks succeed or fail together."""

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

from ds_trainer.checkpoint.folder import LAYOUT, RUN, STATE, commit, fingerprint, folder_of, rank_file
from ds_trainer.checkpoint.shard_writer import INDEX, Shard, write_shards
from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import MachineError
from ds_trainer.files import partial_path, sync


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
        write_config_and_tokenizer: Writes config, generation config and tokenizer into an empty folder.
    """

    state: Mapping[str, Any]
    run: Mapping[str, Any]
    layout: Mapping[str, Any]
    write_config_and_tokenizer: Callable[[Path], None]


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
    shared.write_config_and_tokenizer(aside / "model")


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
