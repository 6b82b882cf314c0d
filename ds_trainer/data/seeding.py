"""Random numbers that depend on a given key alone, without a change to the generators' states afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch's CPU at the end, so that dropout is unaffected."""
    python, array, tensor = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.default_generator.set_state(tensor)


def seed_rngs(*key: int) -> None:
    """Seeds the three global generators with `key`; equal keys give equal numbers in any process.

    `torch.manual_seed` would also seed the GPU's generator, whose state `preserved_rng` does not restore.
    """
    sequence = np.random.SeedSequence(key)
    python, tensor = (int(word) for word in sequence.generate_state(2, np.uint64))
    random.seed(python)
    np.random.seed(sequence.generate_state(4))
    torch.default_generator.manual_seed(tensor)
