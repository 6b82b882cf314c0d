"""This process's coordinates among the ranks, from its launcher's variables. Pure.

torchrun, deepspeed, accelerate launch and `ds-trainer train --nproc` set RANK and similar variables; mpirun, mpiexec
and srun set their own. A launcher of the first kind may run inside one of the others, so RANK is read first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ds_trainer.errors import MachineError
from ds_trainer.launch.env_vars import grid_of, number, require, shown
from ds_trainer.launch.mpi import check_unknown_mpi, mpi_grid
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.launch.slurm import first_host, port_of_job, slurm_grid, started_by_srun

DEFAULT_PORT = "29500"
_TORCH = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """What a launcher's variables say.

    Args:
        grid: This process's coordinates.
        address: Host of rank 0; None in a world of one process.
        port: Port that rank 0 listens at; None in a world of one process.
    """

    grid: Grid = Grid()
    address: str | None = None
    port: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Variables under the names that torch, DeepSpeed and the logger read."""
        values = {
            "RANK": str(self.grid.rank),
            "WORLD_SIZE": str(self.grid.world),
            "LOCAL_RANK": str(self.grid.local_rank),
            "LOCAL_WORLD_SIZE": str(self.grid.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: value for name, value in values.items() if value is not None}


def grid_from_environment(environ: MutableMapping[str, str] = os.environ) -> Grid:
    """Reads the launcher's variables, and sets those that torch, DeepSpeed and the logger read.

    Raises:
        MachineError: See `read_launch`.
    """
    launch = read_launch(environ)
    environ.update(launch.variables)
    return launch.grid


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Reads the variables of torchrun and similar launchers, of an MPI, or of srun; a plain process has none.

    Raises:
        MachineError: Variables are missing, are not numbers, contradict one another, or count ranks that no launcher
            started.
    """
    if "RANK" not in environ:
        if launch := _from_mpi_or_srun(environ):
            _check_world_size(environ, launch.grid)
            return launch
        _check_accelerate(environ)
    return _from_torch(environ)


def check_local_rank(argument: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Checks the argument `--local_rank`, which some launchers add to a script's own arguments; -1 means none.

    Raises:
        MachineError: It differs from the variables.
    """
    if argument in (None, -1):
        return
    variables = read_launch(environ).variables
    if str(argument) != variables["LOCAL_RANK"]:
        raise MachineError(
            f"--local_rank is {argument}, and by its environment this process has {shown(variables, variables)}",
            "a launcher's argument and its variables name the same local rank",
            "leave --local_rank out: the variables are enough, and launchers that need it add it themselves",
        )


def _from_torch(environ: Mapping[str, str]) -> Launch:
    if "WORLD_SIZE" not in environ and "RANK" not in environ:
        return Launch()
    all_set = all(environ.get(name) for name in _TORCH + _MASTER)
    if not all_set and environ.get("WORLD_SIZE") == "1" and environ.get("RANK", "0") == "0":
        return Launch()
    require(environ, _TORCH + _MASTER, "a launcher")
    # The deepspeed launcher calls the number of ranks on a node LOCAL_SIZE.
    grid = _grid(environ, _TORCH, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    return _checked_port(Launch(grid, environ["MASTER_ADDR"], environ["MASTER_PORT"]))


def _from_mpi_or_srun(environ: Mapping[str, str]) -> Launch | None:
    grid = mpi_grid(environ)
    # mpiexec may start its helpers by srun, whose tasks are then not the ranks; and srun may start the ranks of an MPI,
    # and then names their host too.
    task = slurm_grid(environ) if grid is None or started_by_srun(environ) else None
    if grid is None:
        check_unknown_mpi(environ, task)
    if task is not None and grid in (None, task):
        return _at(environ, task, first_host(environ), port_of_job(environ) or DEFAULT_PORT)
    return None if grid is None else _at(environ, grid, None, DEFAULT_PORT)


def _grid(environ: Mapping[str, str], names: tuple[str, str, str], local_world: tuple[str, ...]) -> Grid:
    """Coordinates from these variables; all ranks are on this node if no variable of `local_world` is set."""
    source = next((name for name in local_world if environ.get(name)), names[0])
    return grid_of(environ, names, (source, number(environ, source)))


def _at(environ: Mapping[str, str], grid: Grid, host: str | None, port: str) -> Launch:
    """A launch by an MPI or srun, which set neither MASTER_ADDR nor MASTER_PORT."""
    if grid.world == 1:
        return Launch(grid)
    # On one node the address needs no name resolution: containers often cannot resolve their own name.
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if grid.local_world == grid.world else host)
    if address is None:
        raise MachineError(
            f"{grid.world} ranks, {grid.local_world} of them on this node, and MASTER_ADDR is not set",
            "ranks on several nodes connect to rank 0's host, which mpirun and mpiexec do not name",
            f"name it: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT={DEFAULT_PORT} ... (Open MPI), or mpiexec -genv "
            f"MASTER_ADDR HOST -genv MASTER_PORT {DEFAULT_PORT} ... (MPICH, Intel MPI)",
        )
    return _checked_port(Launch(grid, address, environ.get("MASTER_PORT") or port))


def _checked_port(launch: Launch) -> Launch:
    if not 0 <= number({"MASTER_PORT": launch.port or ""}, "MASTER_PORT") < 2**16:
        raise MachineError(f"MASTER_PORT={launch.port}", "a port is below 65536", "set MASTER_PORT to a free port")
    return launch


def _check_world_size(environ: Mapping[str, str], grid: Grid) -> None:
    """Scripts for clusters often export WORLD_SIZE, and leave RANK to the variables of srun or of an MPI."""
    if environ.get("WORLD_SIZE") not in (None, "", str(grid.world)):
        raise MachineError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}, and srun or an MPI started {grid.world} ranks",
            "all variables name one number of ranks",
            "unset WORLD_SIZE, or start as many ranks as it says",
        )


def _check_accelerate(environ: Mapping[str, str]) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process, yet sets a host for several."""
    if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ and "WORLD_SIZE" not in environ:
        raise MachineError(
            f"accelerate launch sets {shown(environ, _MASTER)} but not RANK and WORLD_SIZE",
            "with --cpu or use_cpu it starts one process, whatever --num_processes says",
            "start with accelerate launch --multi_gpu --num_processes N, which starts N on CPUs too, or with "
            "ds-trainer train --nproc N; for one process unset MASTER_ADDR",
        )
