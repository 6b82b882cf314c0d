"""The process group and the device of this rank, from the launcher's variables."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ds_trainer.errors import MachineError
from ds_trainer.mesh.grid import Grid

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(minutes=5)
"""Ranks that start together load torch within minutes of one another, even from a cold network drive."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the world, its device and its process groups.

    Args:
        grid: Rank arithmetic.
        device: Device that this rank computes on.
        dp_group: Ranks that see different samples.
    """

    grid: Grid
    device: torch.device
    dp_group: dist.ProcessGroup

    def sum(self, *values: float) -> list[float]:
        """Sums float64 numbers over the data ranks.

        Comm: one all-reduce over `dp_group`, 8 bytes per value.
        """
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self.dp_group)
        return tensor.tolist()

    def gather_objects(self, value: object) -> list:
        """One picklable object from each data rank, in rank order, on every rank."""
        out: list = [None] * self.grid.dp_size
        dist.all_gather_object(out, value, group=self.dp_group)
        return out

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrites tensors with data rank 0's.

        Comm: one broadcast per tensor over `dp_group`, of its own bytes.
        """
        for tensor in tensors:
            dist.broadcast(tensor, group=self.dp_group, group_src=0)


def grid_from_environment(environ: dict[str, str] | os._Environ[str] = os.environ) -> Grid:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a plain process has none of them.

    Raises:
        MachineError: Some of the variables are set and others missing, or they contradict one another.
    """
    if "WORLD_SIZE" not in environ and "RANK" not in environ:
        return Grid()
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if missing and environ.get("WORLD_SIZE") == "1" and environ.get("RANK", "0") == "0":
        return Grid()
    if missing:
        found = ", ".join(f"{n}={environ[n]}" for n in needed if environ.get(n))
        raise MachineError(
            f"the environment sets {found} but not {', '.join(missing)}",
            "a launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together",
            f"start with deepspeed, torchrun or accelerate launch, or set {', '.join(missing)}",
        )
    try:
        rank, world, local_rank = (int(environ[name]) for name in needed[:3])
        local_world = int(environ.get("LOCAL_WORLD_SIZE") or world)
    except ValueError as error:
        raise MachineError(
            f"a launcher variable is not a number ({error})",
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are whole numbers",
            "start with deepspeed, torchrun or accelerate launch",
        ) from None
    if not (0 <= rank < world and 0 <= local_rank < local_world):
        raise MachineError(
            f"RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_world}",
            "0 <= RANK < WORLD_SIZE and 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE",
            "start with one launcher only, and unset variables left over from another",
        )
    return Grid(world, rank, local_rank, local_world)


def init_mesh(grid: Grid, device_kind: Literal["cpu", "cuda"]) -> Mesh:
    """Joins the process group, or takes the one that exists, and picks this rank's device.

    Raises:
        MachineError: The group cannot be formed, has another size than the launcher says, or this rank has no device.
    """
    # DeepSpeed takes the first accelerator it finds unless told; it reads this when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", device_kind)
    device = _pick_device(grid, device_kind)
    if not dist.is_initialized():
        _join(grid, device)
    if dist.get_world_size() != grid.world or dist.get_rank() != grid.rank:
        raise MachineError(
            f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the launcher says rank {grid.rank} of {grid.world}",
            "every process that was launched must train in one group",
            "start with one launcher only, and let ds_trainer form the process group",
        )
    # DeepSpeed reads these even in a plain process.
    for name, value in (("RANK", grid.rank), ("WORLD_SIZE", grid.world), ("LOCAL_RANK", grid.local_rank)):
        os.environ.setdefault(name, str(value))
    group = dist.group.WORLD
    assert group is not None
    return Mesh(grid, device, group)


def _pick_device(grid: Grid, kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if grid.local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"local rank {grid.local_rank} has no GPU: this node shows {torch.cuda.device_count()}",
            "every rank needs a GPU of its own",
            "launch no more processes per node than it has GPUs, or set run.device to cpu",
        )
    device = torch.device("cuda", grid.local_rank)
    torch.cuda.set_device(device)
    return device


def _join(grid: Grid, device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if grid.world == 1:
        # No port: two plain runs on one machine cannot collide.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        store, _, _ = next(dist.rendezvous("env://", grid.rank, grid.world, timeout=JOIN_TIMEOUT))
        store.set_timeout(COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            backend,
            store=store,
            rank=grid.rank,
            world_size=grid.world,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        port = os.environ.get("MASTER_PORT")
        raise MachineError(
            f"rank {grid.rank} cannot join the process group at {os.environ.get('MASTER_ADDR')}:{port} ({error})",
            f"rank 0 listens at MASTER_ADDR:MASTER_PORT, and all {grid.world} ranks must reach it",
            f"if port {port} is busy choose another (deepspeed --master_port N, torchrun --master_port N); "
            "if ranks are missing start all of them with one launcher",
        ) from error
