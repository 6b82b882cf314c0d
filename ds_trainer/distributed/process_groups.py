"""The process group and the device of this rank, from the launcher's variables."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist

from ds_trainer.distributed.rendezvous import join_store
from ds_trainer.errors import MachineError
from ds_trainer.health.hang import DEFAULTS, Timeouts
from ds_trainer.health.monitor import Monitor, start_monitor
from ds_trainer.launch.rank_grid import Grid

T = TypeVar("T")

_MARGIN_S = 60.0
"""The group's own timeout comes later than the watchdog's, whose text names the ranks that did not come."""

_LAST_TENSORS_S = 0.25
_releases: list[WeakMethod] = []
_hosts: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, Monitor]] = WeakKeyDictionary()
"""The gloo group and the monitor of each default group: one of each, however many trainers a program makes."""


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates in the world, its device and its process groups.

    Groups named `host` use gloo, for numbers and objects on the host: they wait for no GPU, and their collectives
    cannot be mixed up with the engine's.

    Args:
        grid: Rank arithmetic.
        device: Device that this rank computes on.
        dp_group: Ranks that hold the same shards of the model and see different samples.
        tp_group: Ranks that shard this rank's layers among them, and see the same samples.
        pp_group: Ranks of this rank's pipeline, in stage order; they see the same samples.
        model_group: Ranks that hold one replica of the model together: the tensor-parallel ranks of all stages.
        host_group: All ranks.
        dp_host_group: The ranks of `dp_group`.
        tp_host_group: The ranks of `tp_group`.
        pp_host_group: The ranks of `pp_group`.
        model_host_group: The ranks of `model_group`.
        monitor: Ends this rank when another one fails, and the others when this one does.
    """

    grid: Grid
    device: torch.device
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    dp_host_group: dist.ProcessGroup
    tp_host_group: dist.ProcessGroup
    pp_host_group: dist.ProcessGroup
    model_host_group: dist.ProcessGroup
    monitor: Monitor

    def sum_over_dp(self, *values: float) -> list[float]:
        """Sums float64 numbers over the data-parallel ranks.

        Comm: one all-reduce over `dp_host_group`, 8 bytes per value.
        """
        return self._sum(values, self.dp_host_group)

    def sum_over_pp(self, *values: float) -> list[float]:
        """Sums float64 numbers over the ranks of the pipeline.

        Comm: one all-reduce over `pp_host_group`, 8 bytes per value; none without a pipeline.
        """
        return list(values) if self.grid.pp_size == 1 else self._sum(values, self.pp_host_group)

    def sum_over_world(self, *values: float) -> list[float]:
        """Sums float64 numbers over all ranks.

        Comm: one all-reduce over `host_group`, 8 bytes per value.
        """
        return self._sum(values, self.host_group)

    def _sum(self, values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=group)
        return tensor.tolist()

    def gather_over_world(self, value: object) -> list:
        """Gathers one picklable object from each rank, in rank order, on every rank."""
        return self._gather(value, self.host_group)

    def gather_over_dp(self, value: object) -> list:
        """Gathers one picklable object from each rank of `dp_group`, in dp order, on each of them."""
        return self._gather(value, self.dp_host_group)

    def gather_over_tp(self, value: object) -> list:
        """Gathers one picklable object from each rank of `tp_group`, in tp order, on each of them."""
        return self._gather(value, self.tp_host_group)

    def gather_over_pp(self, value: object) -> list:
        """Gathers one picklable object from each rank of the pipeline, in stage order, on each of them."""
        return self._gather(value, self.pp_host_group)

    def broadcast_object_over_pp(self, value: T | None) -> T:
        """Sends the picklable object of the one pipeline rank that has it to all ranks of the pipeline.

        Args:
            value: The object on the rank that has it, None on the others.

        Comm: one gather of a truth value and one broadcast over `pp_host_group`; none without a pipeline.
        """
        held = [value]
        if self.grid.pp_size > 1:
            holder = self.gather_over_pp(value is not None).index(True)
            dist.broadcast_object_list(held, group=self.pp_host_group, group_src=holder)
        assert held[0] is not None
        return held[0]

    def _gather(self, value: object, group: dist.ProcessGroup) -> list:
        out: list = [None] * group.size()
        dist.all_gather_object(out, value, group=group)
        return out

    def broadcast_over_world(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrites tensors with rank 0's, the same on all ranks.

        Comm: one broadcast per tensor over all ranks, of its own bytes.
        """
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def broadcast_over_dp(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrites tensors with those of the first data-parallel rank, which holds the same shards of the model.

        Comm: one broadcast per tensor over `dp_group`, of its own bytes.
        """
        for tensor in tensors:
            dist.broadcast(tensor, group=self.dp_group, group_src=0)


def init_mesh(grid: Grid, device_kind: Literal["cpu", "cuda"], timeouts: Timeouts = DEFAULTS) -> Mesh:
    """Joins the process group, or takes an existing one, picks this rank's device, and starts its watchdog.

    Args:
        grid: This rank's coordinates.
        device_kind: What to compute on.
        timeouts: How long ranks may stand still, and wait for one another.

    Raises:
        MachineError: The group cannot be formed, has another size than the launcher says, or this rank has no device.
    """
    # Without this DeepSpeed takes the first accelerator that it finds; it reads the variable when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", device_kind)
    device = _pick_device(grid, device_kind)
    if not dist.is_initialized():
        _join(grid, device, _group_timeout(timeouts))
    _leave_at_exit()  # Also a group that `TrainingArguments` have formed.
    if dist.get_world_size() != grid.world or dist.get_rank() != grid.rank:
        raise MachineError(
            f"the process group has rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the launcher says rank {grid.rank} of {grid.world}",
            "every process that was launched must train in one group",
            "start with one launcher only, and let ds_trainer form the process group",
        )
    group = dist.group.WORLD
    assert group is not None
    host_group, monitor = _host(group, timeouts)
    axes = (grid.dp_ranks, grid.tp_ranks, grid.pp_ranks, grid.model_ranks)
    dp, tp, pp, model = _groups_of_this_rank(axes, group, timeouts)
    dp_host, tp_host, pp_host, model_host = _groups_of_this_rank(axes, host_group, timeouts, "gloo")
    return Mesh(grid, device, dp, tp, pp, model, host_group, dp_host, tp_host, pp_host, model_host, monitor)


def _groups_of_this_rank(
    axes: Sequence[list[list[int]]], world: dist.ProcessGroup, timeouts: Timeouts, backend: str | None = None
) -> list[dist.ProcessGroup]:
    """This rank's process group along each axis; axes that split the world into the same groups share one."""
    groups: list[dist.ProcessGroup] = []
    for rank_lists in axes:
        if rank_lists in axes[: len(groups)]:
            groups.append(groups[axes.index(rank_lists)])
        elif len(rank_lists) == 1:
            groups.append(world)
        else:
            own, _ = dist.new_subgroups_by_enumeration(rank_lists, timeout=_group_timeout(timeouts), backend=backend)
            assert own is not None
            groups.append(own)
    return groups


def _host(group: dist.ProcessGroup, timeouts: Timeouts) -> tuple[dist.ProcessGroup, Monitor]:
    if group not in _hosts:
        host_group = dist.new_group(backend="gloo", timeout=_group_timeout(timeouts))
        _hosts[group] = host_group, start_monitor(host_group, timeouts)
    host_group, monitor = _hosts[group]
    monitor.set_timeouts(timeouts)
    return host_group, monitor


def _group_timeout(timeouts: Timeouts) -> timedelta:
    return timedelta(seconds=timeouts.collective_s + _MARGIN_S)


def _pick_device(grid: Grid, kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if grid.local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"local rank {grid.local_rank} has no GPU: this node shows {torch.cuda.device_count()}",
            "every rank needs its own GPU",
            "launch no more processes per node than it has GPUs, or set run.device to cpu; under SLURM ask for "
            "--gpus-per-node, not --gpus-per-task",
        )
    device = torch.device("cuda", grid.local_rank)
    torch.cuda.set_device(device)
    return device


def _join(grid: Grid, device: torch.device, timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if grid.world == 1:
        # No port: two plain runs on one machine cannot collide.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    store = join_store(grid)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=grid.rank, world_size=grid.world, timeout=timeout)


def _leave_at_exit() -> None:
    """Ends gloo's threads at exit: the interpreter's end aborts some finished processes with code 134 otherwise."""
    atexit.register(_leave, os.getpid())


def release_at_exit(release: Callable[[], None]) -> None:
    """Calls a bound method when the process ends, if its object still lives: it drops its references to the group.

    DDP's reducer refers to the group, and the threads of a group do not end while an object refers to it.
    """
    _releases.append(WeakMethod(release))


def _leave(pid: int) -> None:
    if os.getpid() != pid or not dist.is_initialized():
        return
    for reference in _releases:
        if (release := reference()) is not None:
            release()
    gc.collect()  # The released objects are in reference cycles.
    dist.destroy_process_group()
    # A gloo thread that still frees a finished collective's tensors aborts without the interpreter.
    time.sleep(_LAST_TENSORS_S)
