"""Random numbers that depend on given keys alone, and leave the process's own streams where they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Puts the global generators of Python, NumPy and torch's CPU back at the end: dropout goes on where it was."""
    python, array, tensor = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.default_generator.set_state(tensor)


def seed_rngs(*key: int) -> None:
    """Starts the three global generators anew from `key`; equal keys give equal numbers in any process.

    `torch.manual_seed` would reach the GPU's generator too, whose state nothing here puts back.
    """
    sequence = np.random.SeedSequence(key)
    python, tensor = (int(word) for word in sequence.generate_state(2, np.uint64))
    random.seed(python)
    np.random.seed(sequence.generate_state(4))
    torch.default_generator.manual_seed(tensor)
