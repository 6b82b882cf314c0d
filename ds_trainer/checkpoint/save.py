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
from ds_trainer.files import apply_umask, partial_path, sync


@dataclass(frozen=True)
class RankState:
    """State that differs between ranks.

    Args:
        tensors: Tensors by name.
        rest: Other values, as JSON.
    """

    tensors: Mapping[str, torch.Tensor]
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class SharedState:
    """State that all ranks share, written by rank 0.

    Args:
        state: Progress of the run: counts, metrics, loss scale.
        run: The resolved config.
        layout: The slices that every rank owns.
        write_config_and_tokenizer: Writes config, generation config and tokenizer into an empty folder.
    """

    state: Mapping[str, Any]
    run: Mapping[str, Any]
    layout: Mapping[str, Any]
    write_config_and_tokenizer: Callable[[Path], None]


def save(
    output_dir: Path, step: int, shards: Mapping[str, Shard], rank_state: RankState, shared: SharedState, mesh: Mesh
) -> Path:
    """Saves a checkpoint: writes to a temporary folder, syncs, reads back, renames. Every rank must call it.

    Args:
        output_dir: The run's folder, which every rank sees.
        step: Optimizer steps taken.
        shards: This rank's shards of master weights and optimizer states.
        rank_state: This rank's own state.
        shared: State that all ranks share; read on rank 0 only.
        mesh: Process groups.

    Returns:
        The checkpoint's folder.

    Raises:
        MachineError: On every rank, if one could not write; earlier checkpoints are untouched.
    """
    folder = folder_of(output_dir, step)
    partial, is_first = partial_path(folder), mesh.grid.rank == 0
    try:
        with consensus(mesh, f"the save of {folder.name}"), _write_errors(folder):
            if is_first:
                _write_shared(partial, shared)
        with consensus(mesh, f"the folder of {folder.name}"):
            _require_shared_folder(partial, mesh.grid.rank)
        _write_shards(shards, partial, mesh.grid.rank, folder)
        written: dict[str, dict[str, int | str]] = {}
        with consensus(mesh, f"the files of {folder.name}"), _write_errors(folder):
            _write_rank(partial, mesh.grid.rank, rank_state)
            names = [p.relative_to(partial).as_posix() for p in _files_of(partial, mesh.grid.rank)]
            written = {name: _sync_and_verify(partial / name) for name in names}
        all_written = mesh.gather_over_world(written)
        with consensus(mesh, f"the manifest of {folder.name}"), _write_errors(folder):
            if is_first:
                commit(partial, folder, {name: mark for written in all_written for name, mark in written.items()})
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: BaseException) -> MachineError:
    return MachineError(
        f"{folder} cannot be written: {error}",
        "a checkpoint needs a writable folder with free space for 12 bytes per trained parameter under AdamW; "
        "earlier checkpoints are untouched",
        "free space, lower checkpoint.keep_last, or set run.output_dir to another drive",
    )


def _write_shared(partial: Path, shared: SharedState) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in ((STATE, shared.state), (RUN, shared.run), (LAYOUT, shared.layout)):
        (partial / name).write_text(json.dumps(content), encoding="utf-8")
    (partial / "model").mkdir()
    shared.write_config_and_tokenizer(partial / "model")


def _require_shared_folder(partial: Path, rank: int) -> None:
    if not partial.is_dir():
        raise MachineError(
            f"rank {rank} does not see {partial}, which rank 0 has just created",
            "all ranks write into one folder, so nodes share its file system",
            "set run.output_dir to a folder on a drive that every node mounts",
        )


def _write_shards(shards: Mapping[str, Shard], partial: Path, rank: int, folder: Path) -> None:
    try:
        write_shards(shards, partial, rank)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        if not isinstance(cause, OSError | SafetensorError):
            raise
        failure = _cannot_write(folder, cause)
        failure.on_all_ranks = True
        raise failure from cause


def _write_rank(partial: Path, rank: int, rank_state: RankState) -> None:
    # The metadata of safetensors is a dictionary of strings.
    save_file(dict(rank_state.tensors), partial / rank_file(rank), metadata={"rest": json.dumps(rank_state.rest)})


def _files_of(partial: Path, rank: int) -> list[Path]:
    """Files that a rank has written; rank 0 writes those without a rank in their name."""
    own = [*partial.glob(f"state-{rank:05d}-*"), partial / rank_file(rank)]
    if rank == 0:  # Listed by name: other ranks are still writing, and safetensors makes temporary files.
        own += [partial / name for name in (STATE, RUN, LAYOUT, INDEX)]
        own += [path for path in (partial / "model").rglob("*") if path.is_file()]
    return own


def _sync_and_verify(path: Path) -> dict[str, int | str]:
    """Gives a file its mode, syncs it, opens it, and returns its fingerprint."""
    apply_umask(path)
    sync(path)
    if path.suffix == ".safetensors" and path.parent.name != "model":
        with safe_open(path, framework="pt") as file:
            file.keys()
    return fingerprint(path)
