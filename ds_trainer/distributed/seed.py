"""Random numbers of a rank."""

from __future__ import annotations

import random

import numpy as np
import torch

from ds_trainer.launch.rank_grid import Grid


def seed_rank(seed: int, grid: Grid) -> None:
    """Seeds each data-parallel rank and stage differently, so that dropout masks differ between samples and layers.

    Tensor-parallel ranks of one model replica share a seed.

    Args:
        seed: The run's seed.
        grid: This rank's coordinates.
    """
    rank = grid.pp_rank * grid.dp_size + grid.dp_rank
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)
