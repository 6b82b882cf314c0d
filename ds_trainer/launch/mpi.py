"""What the variables of MPI launchers say about this process. Pure.

Each MPI has variables of its own. Some number a process and say nothing about its node, or not even how many there are:
such a process is not alone, and to take it for the only rank would train one model per process.

Sources: mpirun(1) of Open MPI; src/pm/hydra of MPICH, from which the mpiexec of Intel MPI and MVAPICH are made;
mpiexec(1) of Cray PALS; jsrun(1) of IBM Spectrum LSF; the PMIx standard, which has a variable for the rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.errors import MachineError
from ds_trainer.launch.env_vars import grid_of, number, require, shown
from ds_trainer.launch.rank_grid import Grid


@dataclass(frozen=True)
class _Mpi:
    """The variables of a launcher.

    Args:
        launcher: Its name.
        names: Its variables of the number of ranks, the rank and the local rank.
        local_world: Its variable of the number of ranks on this node.
        mark: The variable that only it sets.
    """

    launcher: str
    names: tuple[str, str, str]
    local_world: str
    mark: str


def _of_prefix(launcher: str, prefix: str) -> _Mpi:
    names = (f"{prefix}_SIZE", f"{prefix}_RANK", f"{prefix}_LOCAL_RANK")
    return _Mpi(launcher, names, f"{prefix}_LOCAL_SIZE", mark=f"{prefix}_RANK")


_KNOWN = (
    _of_prefix("mpirun (Open MPI)", "OMPI_COMM_WORLD"),
    _of_prefix("mpirun_rsh (MVAPICH)", "MV2_COMM_WORLD"),
    _of_prefix("jsrun", "JSM_NAMESPACE"),
    _Mpi(
        "mpiexec (MPICH, Intel MPI)", ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"), "MPI_LOCALNRANKS", "MPI_LOCALRANKID"
    ),
    _Mpi("mpiexec (Cray)", ("PMI_SIZE", "PMI_RANK", "PMI_LOCAL_RANK"), "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK"),
)
_SIZES = ("PMI_SIZE", "FLUX_JOB_SIZE")
_RANKS = ("PMI_RANK", "PMIX_RANK", "MVP_COMM_WORLD_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK", "PMI_ID")
"""Variables that number the processes of a launch; most launchers set one or two of them."""


def mpi_grid(environ: Mapping[str, str]) -> Grid | None:
    """This process's coordinates according to an MPI launcher; None where none of the known ones started it.

    Raises:
        MachineError: Variables are missing, are not numbers, or contradict one another.
    """
    mpi = next((mpi for mpi in _KNOWN if mpi.mark in environ), None)
    if mpi is None:
        return None
    require(environ, mpi.names, mpi.launcher)
    # All ranks are on this node where it does not say how many are.
    source = mpi.local_world if environ.get(mpi.local_world) else mpi.names[0]
    return grid_of(environ, mpi.names, (source, number(environ, source)))


def check_unknown_mpi(environ: Mapping[str, str], grid: Grid | None) -> None:
    """Checks that no MPI that is not known started this process as one of several.

    Args:
        environ: The environment.
        grid: What another launcher says, such as srun, which calls an MPI's library to number its tasks.

    Raises:
        MachineError: An MPI numbers this process, and `grid` does not account for it.
    """
    rank = next((name for name in _RANKS if environ.get(name)), None)
    size = next((number(environ, name) for name in _SIZES if environ.get(name)), None)
    if (rank, size) == (None, None) or size == 1:
        return
    if grid is not None and (size is None or size == grid.world) and (rank is None or environ[rank] == str(grid.rank)):
        return
    processes = "processes were" if size is None else f"{size} processes were"
    raise MachineError(
        f"{processes} started by an MPI that is not known: the environment sets {shown(environ, _RANKS + _SIZES)}, "
        "and neither the ranks of a node nor all of MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK",
        "several processes train one model together; each has to know its rank, their number and its rank on the node",
        "set these five in each process; or start with mpirun of Open MPI, mpiexec of MPICH or Intel MPI, srun, "
        "torchrun, or ds-trainer train --nproc N; or unset what is left over of an MPI",
    )
