"""Where a rank is, from the variables of each launcher."""

import pytest

from ds_trainer.errors import MachineError
from ds_trainer.launch.environment import check_local_rank, grid_from_environment, read_launch
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.launch.slurm import first_host, started_by_srun
from tests.helpers.table import table

TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
BARE_SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[003-004,7]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
    "ENVIRONMENT": "BATCH",
}
BATCH_SCRIPT = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SALLOC_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
PTY_SHELL = SALLOC_SHELL | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.case("F11")
@table(
    ("environ", "grid"),
    {
        "a plain process": ({}, Grid()),
        "a plain process with leftovers": ({"LOCAL_RANK": "0"}, Grid()),
        "a world of one without a port": ({"WORLD_SIZE": "1", "RANK": "0"}, Grid()),
        "torchrun": (TORCH | {"LOCAL_WORLD_SIZE": "4"}, Grid(8, 5, 1, 4)),
        "deepspeed, which says LOCAL_SIZE": (TORCH | {"LOCAL_SIZE": "2"}, Grid(8, 5, 1, 2)),
        "a launcher that does not say how many are on the node": (TORCH, Grid(8, 5, 1, 8)),
        "mpirun": (OPENMPI | {"MASTER_ADDR": "head"}, Grid(8, 5, 1, 4)),
        "mpirun on one node": (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), Grid(8, 5, 1, 8)),
        "bare variables of srun": (BARE_SLURM, Grid(2, 1, 1, 2)),
        "srun on uneven nodes": (SRUN, Grid(11, 9, 1, 3)),
        "srun that only says how many nodes": (
            BARE_SLURM | {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODELIST": "a,b"},
            Grid(4, 1, 1, 2),
        ),
        "srun with fewer tasks than the job reserved": (SRUN | {"SLURM_NTASKS": "64"}, Grid(11, 9, 1, 3)),
        "torchrun inside srun": (SRUN | TORCH | {"LOCAL_WORLD_SIZE": "4"}, Grid(8, 5, 1, 4)),
        "srun in a script that exports the same WORLD_SIZE": (BARE_SLURM | {"WORLD_SIZE": "2"}, Grid(2, 1, 1, 2)),
        "a shell of salloc": (SALLOC_SHELL, Grid()),
        "a shell of salloc that is a step of its own": (PTY_SHELL, Grid()),
        "a batch script of one task": (BATCH_SCRIPT | {"SLURM_NTASKS": "1"}, Grid()),
        "a batch script that says no number of tasks": (without(BATCH_SCRIPT, "SLURM_NTASKS"), Grid()),
    }.values(),
)
def test_a_process_is_where_its_launcher_says(environ, grid):
    assert grid_from_environment(dict(environ)) == grid


@pytest.mark.case("F11")
@pytest.mark.parametrize(
    ("environ", "address", "port"),
    {
        "as given": (TORCH, "10.0.0.1", "29500"),
        "one node needs no name": (BARE_SLURM | {"SLURM_NODELIST": "unknown-host"}, "127.0.0.1", "29500"),
        "the step's first node, a port of the job": (SRUN, "gpu003", "24567"),
        "what the user exported comes first": (SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, "head", "1"),
        "mpirun on one node": (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), "127.0.0.1", "29500"),
        "mpirun on two": (OPENMPI | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}, "head", "1234"),
    }.values(),
)
def test_ranks_meet_at_one_address(environ, address, port):
    launch = read_launch(environ)
    assert (launch.address, launch.port) == (address, port)


@pytest.mark.case("F11")
def test_torch_and_deepspeed_find_what_srun_said_under_their_own_names():
    environ = dict(SRUN)
    grid = grid_from_environment(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[name] for name in names] == ["9", "11", "1", "3", "gpu003", "24567"]
    assert grid_from_environment(environ) == grid, "a second reading finds the same"


def test_a_plain_process_has_a_place_too_and_no_port():
    environ = {}
    grid_from_environment(environ)
    assert environ == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[001-010]", "node001"),
        ("node[7,9-12]", "node7"),
        ("gpu[3-4]-ib,login", "gpu3-ib"),
        ("rack[0-1]node[2-5]", "rack0node2"),
    ],
)
def test_the_first_host_of_a_nodelist(nodelist, host):
    assert first_host({"SLURM_JOB_NODELIST": nodelist}) == host


def test_without_a_nodelist_the_host_is_where_srun_was_typed():
    assert first_host({"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}) == "10.0.0.9"


def test_only_srun_starts_tasks():
    environments = (SRUN, BARE_SLURM, PTY_SHELL, SALLOC_SHELL, BATCH_SCRIPT, {})
    assert [started_by_srun(environ) for environ in environments] == [True, True, True, False, False, False]


@pytest.mark.case("F11")
@pytest.mark.parametrize("launcher", [TORCH, without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), BARE_SLURM])
def test_a_missing_variable_is_named(launcher):
    for name in list(launcher)[1:]:
        with pytest.raises(MachineError, match=f"but not {name}"):
            grid_from_environment(without(launcher, name))


@pytest.mark.case("F11")
def test_a_number_of_ranks_without_a_rank_is_refused():
    with pytest.raises(MachineError, match="sets WORLD_SIZE=2 but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        grid_from_environment({"WORLD_SIZE": "2"})


ACCELERATE_CPU = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.case("F11")
@table(
    ("environ", "text"),
    {
        "rank beyond the world": (TORCH | {"RANK": "8"}, "WORLD_SIZE=8 RANK=8"),
        "negative rank": (TORCH | {"RANK": "-1"}, "RANK=-1"),
        "local rank beyond the node": (
            TORCH | {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"},
            "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4",
        ),
        "a word": (TORCH | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        "a port that is none": (TORCH | {"MASTER_PORT": "http"}, "MASTER_PORT=http is not a number"),
        "a port beyond all ports": (TORCH | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        "a task beyond the step": (BARE_SLURM | {"SLURM_PROCID": "2"}, "SLURM_NTASKS=2 SLURM_PROCID=2"),
        "a node beyond the list": (SRUN | {"SLURM_NODEID": "3"}, r"SLURM_STEP_TASKS_PER_NODE\[3\]=0"),
        "a rank of mpirun beyond its world": (
            OPENMPI | {"OMPI_COMM_WORLD_RANK": "8"},
            "OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=8",
        ),
        "mpirun on several nodes": (OPENMPI, "MASTER_ADDR is not set"),
        "two numbers of ranks": (BARE_SLURM | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4, and srun or an MPI started 2"),
        "a batch script that forgot srun": (BATCH_SCRIPT, "SLURM_NTASKS=4 in a batch script, and srun did not start"),
        "accelerate that starts one of two": (ACCELERATE_CPU, "MASTER_PORT=29500 but not RANK and WORLD_SIZE"),
    }.values(),
)
def test_variables_that_contradict_are_refused(environ, text):
    with pytest.raises(MachineError, match=text):
        grid_from_environment(dict(environ))


@pytest.mark.case("F11")
@pytest.mark.parametrize(("argument", "environ"), [(None, TORCH), (-1, {}), (0, {}), (1, TORCH), (1, BARE_SLURM)])
def test_the_argument_local_rank_is_accepted_where_it_agrees(argument, environ):
    check_local_rank(argument, environ)


@pytest.mark.case("F11")
@pytest.mark.parametrize(("argument", "environ"), [(1, {}), (0, TORCH), (0, BARE_SLURM)])
def test_the_argument_local_rank_is_refused_where_it_contradicts(argument, environ):
    with pytest.raises(
        MachineError, match=f"--local_rank is {argument}, and by its environment this process has RANK="
    ):
        check_local_rank(argument, environ)
