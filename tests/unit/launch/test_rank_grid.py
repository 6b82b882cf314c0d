"""Rank arithmetic."""

from dataclasses import replace

import pytest

from ds_trainer.launch.rank_grid import Grid


def test_without_other_axes_every_rank_is_a_data_rank():
    grid = Grid(world=8, rank=5, local_rank=1, local_world=4)
    assert (grid.dp_size, grid.dp_rank, grid.pp_rank, grid.tp_rank) == (8, 5, 0, 0)


def test_tensor_ranks_are_neighbours_and_pipeline_stages_farthest_apart():
    grid = Grid(world=8, rank=6, tp_size=2, pp_size=2)
    assert (grid.pp_rank, grid.dp_rank, grid.tp_rank) == (1, 1, 0)
    assert grid.tp_ranks == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.dp_ranks == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.pp_ranks == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.model_ranks == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 4), (4, 1), (3, 2), (2, 3), (12, 1)])
def test_every_rank_has_coordinates_of_its_own_and_is_in_one_group_of_each_axis(pp, tp):
    grids = [Grid(world=12, rank=rank, tp_size=tp, pp_size=pp) for rank in range(12)]
    assert len({(grid.pp_rank, grid.dp_rank, grid.tp_rank) for grid in grids}) == 12
    for axis in ("dp_ranks", "tp_ranks", "pp_ranks", "model_ranks"):
        assert sorted(rank for ranks in getattr(grids[0], axis) for rank in ranks) == list(range(12))
    for ranks in grids[0].pp_ranks:
        assert [replace(grids[0], rank=rank).pp_rank for rank in ranks] == list(range(pp))
        assert len({replace(grids[0], rank=rank).dp_rank for rank in ranks}) == 1
