"""Where a rank is, from the variables of MPI launchers; a process of an MPI never takes itself for the only rank."""

import pytest

from ds_trainer.errors import ConfigError, MachineError
from ds_trainer.launch.environment import grid_from_environment, read_launch
from ds_trainer.launch.local_launcher import run_ranks
from ds_trainer.launch.rank_grid import Grid
from tests.helpers.table import table

PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
MPICH = PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = PMI | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_RANKID": "1"}
SRUN = {
    **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
    **{"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    "SLURM_STEP_NODELIST": "gpu[3-4]",
}
BATCH_SCRIPT = {"ENVIRONMENT": "BATCH", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def of_prefix(prefix):
    return {f"{prefix}_{name}": value for name, value in MPI.items()}


MPI = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
HOST = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}


@pytest.mark.case("K12")
@table(
    ("environ", "grid", "address"),
    {
        "MPICH and Intel MPI": (MPICH, Grid(2, 1, 1, 2), "127.0.0.1"),
        "MPICH on several nodes": (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"} | HOST,
            Grid(8, 5, 1, 4),
            "head",
        ),
        "MVAPICH": (of_prefix("MV2_COMM_WORLD") | HOST, Grid(8, 5, 1, 4), "head"),
        "jsrun": (of_prefix("JSM_NAMESPACE") | HOST, Grid(8, 5, 1, 4), "head"),
        "Cray": (CRAY, Grid(2, 1, 1, 2), "127.0.0.1"),
        "MPICH in a batch script of several tasks": (MPICH | BATCH_SCRIPT, Grid(2, 1, 1, 2), "127.0.0.1"),
        "MPICH whose helpers srun started, one a node": (
            MPICH | SRUN | {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "4"} | HOST,
            Grid(8, 5, 1, 4),
            "head",
        ),
        "srun through PMI-2": (SRUN | PMI, Grid(2, 1, 0, 1), "gpu3"),
        "srun through PMI-2 that also sets MPICH's variables": (
            SRUN | PMI | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            Grid(2, 1, 0, 1),
            "gpu3",
        ),
        "srun through PMIx": (SRUN | {"PMIX_RANK": "1"}, Grid(2, 1, 0, 1), "gpu3"),
        "torchrun inside MPICH": (MPICH | TORCH | {"LOCAL_WORLD_SIZE": "4"}, Grid(8, 5, 1, 4), "10.0.0.1"),
        "one process of an MPI": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Grid(), None),
    }.values(),
)
def test_a_process_is_where_its_mpi_says(environ, grid, address):
    launch = read_launch(environ)
    assert (launch.grid, launch.address) == (grid, address)
    assert grid_from_environment(dict(environ) | launch.variables) == grid, "torch reads the same"


@pytest.mark.case("K12")
@table(
    ("environ", "text"),
    {
        "only its number": (
            PMI,
            "2 processes were started by an MPI that is not known: the environment sets PMI_RANK=1",
        ),
        "rank 0 too": (PMI | {"PMI_RANK": "0"}, "2 processes were started by an MPI"),
        "no number of processes": ({"PMIX_RANK": "0"}, "processes were started by an MPI.*PMIX_RANK=0"),
        "Flux": ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}, "4 processes were started by an MPI"),
        "srun that started something else": (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "8 processes were started"),
        "a rank without the number": (
            {"PMI_RANK": "1", "MPI_LOCALRANKID": "1"},
            "sets PMI_RANK=1, MPI_LOCALRANKID=1 but not PMI_SIZE",
        ),
        "a rank beyond the last": (MPICH | {"PMI_RANK": "2"}, "PMI_SIZE=2 PMI_RANK=2"),
        "several nodes and no host": (
            MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
            "(?s)MASTER_ADDR is not set.*mpiexec -genv MASTER_ADDR",
        ),
        "another number in WORLD_SIZE": (MPICH | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4, and srun or an MPI started 2"),
    }.values(),
)
def test_a_process_of_an_mpi_never_trains_alone(environ, text):
    with pytest.raises(MachineError, match=text):
        read_launch(environ)


@pytest.mark.case("K12")
def test_ranks_of_ones_own_are_not_started_inside_an_mpi_that_is_not_known():
    with pytest.raises(MachineError, match="2 processes were started by an MPI that is not known"):
        run_ranks(["true"], 2, PMI)
    with pytest.raises(ConfigError, match="rank 1 of 2 of an MPI"):
        run_ranks(["true"], 2, MPICH)
