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
"""The group's own timeout comes later than the monitor's, whose text names who did not come."""

_LAST_TENSORS_S = 0.25
_holders: list[WeakMethod] = []
_hosts: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, Monitor]] = WeakKeyDictionary()
"""Of each default group its twin on the host and its monitor: one of each, however many trainers a program makes."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the world, its device and its process groups.

    Groups named `host` are over gloo, for numbers and objects that live on the host: no GPU is waited for, and no
    collective of the engine's can be taken for one of these.

    Args:
        grid: Rank arithmetic.
        device: Device that this rank computes on.
        dp_group: Ranks that hold the same part of the model and see different samples.
        tp_group: Ranks that share this rank's layers, and see the same samples.
        pp_group: Ranks of this rank's pipeline, in its order; they see the same samples.
        model_group: Ranks that hold one copy of the model together: tensor ranks of all stages.
        host_group: All ranks.
        dp_host_group: Those of `dp_group`.
        tp_host_group: Those of `tp_group`.
        pp_host_group: Those of `pp_group`.
        model_host_group: Those of `model_group`.
        monitor: Watches over this rank and tells it of the others' end.
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
        """Sums float64 numbers over the data ranks.

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
        """One picklable object from each rank, in rank order, on every rank."""
        return self._gather(value, self.host_group)

    def gather_over_dp(self, value: object) -> list:
        """One picklable object from each data rank, in their order, on every rank."""
        return self._gather(value, self.dp_host_group)

    def gather_over_tp(self, value: object) -> list:
        """One picklable object from each tensor rank, in their order, on every rank."""
        return self._gather(value, self.tp_host_group)

    def gather_over_pp(self, value: object) -> list:
        """One picklable object from each rank of the pipeline, in its order, on every rank."""
        return self._gather(value, self.pp_host_group)

    def broadcast_object_over_pp(self, value: T | None) -> T:
        """The picklable object of the one rank of the pipeline that has any, on every rank of it.

        Args:
            value: It, or None.

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
        """Overwrites tensors with those of the first data rank that holds the same part of the model.

        Comm: one broadcast per tensor over `dp_group`, of its own bytes.
        """
        for tensor in tensors:
            dist.broadcast(tensor, group=self.dp_group, group_src=0)


def init_mesh(grid: Grid, device_kind: Literal["cpu", "cuda"], timeouts: Timeouts = DEFAULTS) -> Mesh:
    """Joins the process group, or takes the one that exists, picks this rank's device, and starts its monitor.

    Args:
        grid: This rank's place.
        device_kind: What to compute on.
        timeouts: How long ranks may stand still, and wait for one another.

    Raises:
        MachineError: The group cannot be formed, has another size than the launcher says, or this rank has no device.
    """
    # DeepSpeed takes the first accelerator it finds unless told; it reads this when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", device_kind)
    device = _pick_device(grid, device_kind)
    if not dist.is_initialized():
        _join(grid, device, _group_timeout(timeouts))
    _leave_at_exit()  # Also one that `TrainingArguments` have formed.
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
    dp, tp, pp, model = _own(axes, group, timeouts)
    dp_host, tp_host, pp_host, model_host = _own(axes, host_group, timeouts, "gloo")
    return Mesh(grid, device, dp, tp, pp, model, host_group, dp_host, tp_host, pp_host, model_host, monitor)


def _own(
    axes: Sequence[list[list[int]]], world: dist.ProcessGroup, timeouts: Timeouts, backend: str | None = None
) -> list[dist.ProcessGroup]:
    """For each axis this rank's group of those that share the world; axes that do so alike have one group."""
    groups: list[dist.ProcessGroup] = []
    for everyones in axes:
        if everyones in axes[: len(groups)]:
            groups.append(groups[axes.index(everyones)])
        elif len(everyones) == 1:
            groups.append(world)
        else:
            own, _ = dist.new_subgroups_by_enumeration(everyones, timeout=_group_timeout(timeouts), backend=backend)
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
            "every rank needs a GPU of its own",
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
    """Ends gloo's threads: left to the interpreter's end they abort some finished processes with exit code 134."""
    atexit.register(_leave, os.getpid())


def release_at_exit(release: Callable[[], None]) -> None:
    """Calls a bound method when the process ends, if its object still lives then: what holds on to the group lets go.

    DDP's reducer does, and the threads of a group that somebody holds do not end with it.
    """
    _holders.append(WeakMethod(release))


def _leave(pid: int) -> None:
    if os.getpid() != pid or not dist.is_initialized():
        return
    for holder in _holders:
        if (release := holder()) is not None:
            release()
    gc.collect()  # What has let go lies in cycles of references.
    dist.destroy_process_group()
    # A thread of gloo's that still frees a finished collective's tensors needs the interpreter, and aborts without it.
    time.sleep(_LAST_TENSORS_S)
