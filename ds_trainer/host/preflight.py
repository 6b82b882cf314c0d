"""Checks of disk and memory before a model is loaded, so that a run that cannot fit ends at once with the reason."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import defaultdict
from pathlib import Path

from ds_trainer.config.memory_needs import buffers, memory_row
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.errors import MachineError
from ds_trainer.host.free_space import size_text, space_fault
from ds_trainer.host.host_memory import available_bytes
from ds_trainer.host.swap_folder import remove_stale_swap_folders
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.planning.memory import DTYPE_BYTES, MemoryItem

_BESIDE_WEIGHTS = 40e6
"""Bytes left for what an export and a run write beside weights: a large tokenizer takes 33 MB."""


def check_resources(resolved: ResolvedConfig, num_parameters: int | None, grid: Grid) -> None:
    """Checks NVMe paths, host memory and the output folder.

    Every rank calls it. The first rank of a node checks what the node's ranks share: a later one would count what the
    first has begun to use.

    Args:
        resolved: The run's config.
        num_parameters: Elements of the full model, a tied parameter counted once, for the size of the export;
            None: not known. What a rank keeps depends on the run's own size.
        grid: This rank's coordinates.

    Raises:
        MachineError: The run cannot work on this machine.
    """
    if grid.local_rank == 0:
        check_nvme(resolved, grid.local_world)
        check_host_memory(resolved, grid.local_world)
    if grid.rank == 0:
        check_output_dir(resolved, num_parameters or 0)


def check_nvme(resolved: ResolvedConfig, local_ranks: int) -> None:
    """Checks that each nvme_path is a folder on which DeepSpeed can write, with space for the swap files of this node.

    Raises:
        MachineError: A path is missing, not writable, without direct I/O, or too small.
    """
    row, num_parameters = memory_row(resolved), resolved.size.num_parameters or 0
    by_drive: dict[int, list[tuple[str, Path, float]]] = defaultdict(list)
    for key in ("offload_optimizer", "offload_param"):
        section = getattr(resolved.config.zero, key)
        if section.device == "nvme":
            path, dotted = Path(section.nvme_path), f"zero.{key}.nvme_path"
            check_swap_path(path, dotted)
            remove_stale_swap_folders(path)
            swapped = [
                p.size for p in row.items if p.place == "nvme" and (p.name == "parameters") == (key == "offload_param")
            ]
            by_drive[path.stat().st_dev].append((dotted, path, sum(swapped) * num_parameters * local_ranks))
    for files in by_drive.values():
        dotted, path, _ = files[0]
        size = sum(size for _, _, size in files)
        _require_space(path, size, f"swap files of {local_ranks} rank(s)", f"{dotted} to a folder on a larger drive")


def check_swap_path(path: Path, key: str) -> None:
    """Checks a swap folder by writing to it as DeepSpeed does; makes it if only its last component is missing.

    Raises:
        MachineError: The folder cannot be made, is not a folder, is not writable, or has no direct I/O.
    """
    try:
        path.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"ds_trainer")
    except OSError as error:
        raise MachineError(
            f"{key} is {str(path)!r}: {error.strerror}",
            "swap files need a folder that this user can write to; only its last component is made if it is missing",
            f"set {key} to a writable folder on the drive, or make it",
        ) from error
    if not has_direct_io(path):
        raise MachineError(
            f"{key} is {str(path)!r}, and its file system has no direct I/O (O_DIRECT)",
            "DeepSpeed opens its swap files with O_DIRECT, past the kernel's page cache",
            f"set {key} to a folder on a local drive (ext4, xfs), not on tmpfs or a network or overlay file system",
        )


def has_direct_io(folder: Path) -> bool:
    """Whether a block can be written to a file in `folder` with O_DIRECT."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    os.close(descriptor)
    try:
        direct = os.open(name, os.O_WRONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:  # Direct I/O needs aligned memory.
                return os.write(direct, page) == mmap.PAGESIZE
        finally:
            os.close(direct)
    except OSError:
        return False
    finally:
        os.unlink(name)


def check_host_memory(resolved: ResolvedConfig, local_ranks: int) -> None:
    """Checks that parameters, gradients, optimizer state and buffers of this node's ranks fit into host memory.

    Activations, which depend on the data, come on top and are not counted.

    Raises:
        MachineError: They do not fit.
    """
    parts = host_parts(resolved)
    needed = sum(part.size for part in parts) * local_ranks
    free, bound = available_bytes()
    if needed <= free:
        return
    detail = ", ".join(f"{part.name} {size_text(part.size * local_ranks)}" for part in parts if part.size)
    raise MachineError(
        f"{local_ranks} rank(s) here: needs about {size_text(needed)} of host memory, {size_text(free)} free ({bound})",
        f"what a run keeps must fit: {detail}; activations come on top",
        "use fewer ranks per machine or a smaller model, raise the limit, or keep more on a drive "
        "(zero.stage 3 with zero.offload_optimizer.device and zero.offload_param.device nvme)",
    )


def host_parts(resolved: ResolvedConfig) -> list[MemoryItem]:
    """What one rank keeps in host memory at its peak; `size` is in bytes."""
    row, num_parameters = memory_row(resolved), resolved.size.num_parameters or 0
    kept = [MemoryItem(item.name, item.size * num_parameters, item.place) for item in row.items]
    kept += [MemoryItem("gradients not yet reduced", row.transient * num_parameters)]
    kept += buffers(resolved)
    wanted = {"device", "host"} if resolved.machine.device == "cpu" else {"host"}
    return [part for part in kept if part.place in wanted]


def check_output_dir(resolved: ResolvedConfig, num_parameters: int) -> None:
    """Checks that `run.output_dir` can be made and written to, and has space for the exported model.

    Raises:
        MachineError: It cannot, or the space is too small.
    """
    path = Path(resolved.config.run.output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise MachineError(
            f"run.output_dir is {str(path)!r}: {error.strerror}",
            "the exported model, the metrics and the plots are written there",
            "set run.output_dir to a folder that this user can write to",
        ) from error
    export = resolved.config.checkpoint
    if export.export:
        # An export without a dtype takes the checkpoint's, which has at least two bytes.
        size = num_parameters * DTYPE_BYTES[export.export_dtype or "bf16"] + _BESIDE_WEIGHTS
        _require_space(
            path, size, "the exported model", "run.output_dir to a larger drive, or checkpoint.export to false"
        )


def _require_space(path: Path, size: float, what: str, change: str) -> None:
    if fault := space_fault(path, size):
        raise MachineError(
            f"{what}: {fault}",
            "there must be free space before the run starts, not only when it writes",
            f"free some space, or set {change}",
        )
