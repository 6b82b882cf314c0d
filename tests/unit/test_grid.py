"""Where a rank is, from the launcher's variables alone."""

import pytest

from ds_trainer.errors import MachineError
from ds_trainer.mesh.grid import Grid
from ds_trainer.mesh.mesh import grid_from_environment

LAUNCHED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_today_every_rank_is_a_data_rank():
    grid = Grid(world=8, rank=5, local_rank=1, local_world=4)
    assert (grid.dp_size, grid.dp_rank) == (8, 5)


def test_a_plain_process_is_a_world_of_its_own():
    assert grid_from_environment({}) == Grid(1, 0, 0, 1)
    assert grid_from_environment({"LOCAL_RANK": "0"}) == Grid(1, 0, 0, 1)
    assert grid_from_environment({"WORLD_SIZE": "1", "RANK": "0"}) == Grid(1, 0, 0, 1)


def test_a_launched_process_is_where_the_launcher_says():
    assert grid_from_environment(LAUNCHED | {"LOCAL_WORLD_SIZE": "4"}) == Grid(8, 5, 1, 4)
    assert grid_from_environment(LAUNCHED) == Grid(8, 5, 1, 8), "one node where the launcher does not say"


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_missing_variable_is_named(name):
    with pytest.raises(MachineError, match=f"but not {name}"):
        grid_from_environment({key: value for key, value in LAUNCHED.items() if key != name})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"RANK": "8"}, "RANK=8 WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4"),
        ({"WORLD_SIZE": "two"}, "not a number"),
    ],
)
def test_variables_that_contradict_are_refused(changed, text):
    with pytest.raises(MachineError, match=text):
        grid_from_environment(LAUNCHED | changed)
