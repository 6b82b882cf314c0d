"""Rank arithmetic."""

from ds_trainer.mesh.grid import Grid


def test_today_every_rank_is_a_data_rank():
    grid = Grid(world=8, rank=5, local_rank=1, local_world=4)
    assert (grid.dp_size, grid.dp_rank) == (8, 5)
