"""What SLURM's variables say about the tasks of a job step. Pure.

srun starts tasks; sbatch and salloc only allocate nodes for them, yet they set SLURM_NTASKS too, and a batch script
even has SLURM_PROCID=0. Only srun sets SLURM_STEP_ID; only sbatch sets ENVIRONMENT=BATCH, which the steps of its script
inherit.

Source: src/common/env.c of SLURM; the manual pages of srun, sbatch and salloc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_trainer.errors import MachineError
from ds_trainer.launch.env_vars import grid_of, number, require
from ds_trainer.launch.rank_grid import Grid

_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def slurm_grid(environ: Mapping[str, str]) -> Grid | None:
    """This task's coordinates in its job step; None if srun did not start this process.

    Raises:
        MachineError: A batch script that asked for several tasks runs without srun, or variables are missing or wrong.
    """
    if not started_by_srun(environ):
        _check_not_batch_only(environ)
        return None
    names = (_first(environ, ("SLURM_STEP_NUM_TASKS",)) or "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    require(environ, names, "srun")
    return grid_of(environ, names, _on_this_node(environ, names[0]))


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task, rather than a shell of salloc, a batch script, or a process without SLURM."""
    return "SLURM_PROCID" in environ and not _is_batch_script(environ)


def first_host(environ: Mapping[str, str]) -> str | None:
    """The host of task 0: the first of the step's nodes, else the node on which srun was called; None: unknown.

    `gpu[003-004,7],login` is gpu003.
    """
    name = _first(environ, _NODELISTS)
    if name is None:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR")
    hosts = re.match(r"(?:[^,\[]|\[[^\]]*\])+", environ[name])
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts[0]) if hosts else None


def port_of_job(environ: Mapping[str, str]) -> str | None:
    """A port that all tasks of a job compute and other jobs rarely share, below the ephemeral ports."""
    return str(20000 + number(environ, "SLURM_JOB_ID") % 10000) if environ.get("SLURM_JOB_ID") else None


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    return environ.get("ENVIRONMENT") == "BATCH" and "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ


def _check_not_batch_only(environ: Mapping[str, str]) -> None:
    if _is_batch_script(environ) and environ.get("SLURM_NTASKS", "1") != "1":
        raise MachineError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']} in a batch script, and srun did not start this process",
            "sbatch runs its script once; only srun starts all tasks, and this one would wait for the others for ever",
            "write srun before the command, start the ranks of one node with ds-trainer train --nproc N or torchrun, "
            "or ask sbatch for --ntasks=1",
        )


def _on_this_node(environ: Mapping[str, str], world: str) -> tuple[str, int]:
    """Source of the number of tasks on this node, and the number: one of a list such as `4(x2),3`."""
    if name := _first(environ, _TASKS_PER_NODE):
        runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[name])
        counts = [int(count) for count, times in runs for _ in range(int(times or 1))]
        node = number(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
        return f"{name}[{node}]", counts[node] if node < len(counts) else 0
    if nodes := _first(environ, _NUM_NODES):
        return f"{world}/{nodes}", number(environ, world) // number(environ, nodes)
    return world, number(environ, world)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The first of these variables that is set."""
    return next((name for name in names if environ.get(name)), None)
