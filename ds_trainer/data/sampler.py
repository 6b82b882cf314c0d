"""The order of samples: a sequence of global batches that depends on the seed alone. Pure.

Ranks, micro-batches and accumulation only partition a global batch, so the same run on another layout sees the same
samples at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ds_trainer.errors import DataError


class Position(NamedTuple):
    """Where a step begins.

    Args:
        step: Optimizer steps before it.
        epoch: The pass over the data, from 0.
        start: Samples of that epoch before it.
    """

    step: int = 0
    epoch: int = 0
    start: int = 0


class GlobalBatchSampler:
    """Sample indices of any step in constant time: its global batch, and this rank's micro-batches of it.

    The last batch of an epoch is short where `global_size` does not divide `num_samples`: no sample is repeated or
    skipped, and an epoch has ceil(num_samples / global_size) steps.

    Example:
        10 samples, global size 8, micro size 2, 2 data-parallel ranks, no shuffling. Step 1 holds samples 8
        and 9; rank 0 gets `[[8, 9]]` and rank 1 gets `[[]]`.

    Args:
        num_samples: Length of the data set.
        global_size: Samples per step over all ranks.
        micro_size: Samples per forward pass of one rank.
        dp_rank: This rank's data-parallel rank.
        dp_size: Number of data-parallel ranks.
        seed: Seed of the permutations.
        shuffle: Draw a new permutation each epoch; False: keep the order of the data set.

    Attributes:
        origin: Where steps are counted from. A run that resumes with another global size begins there, in the middle
            of an epoch; the rest of that epoch is split into batches of the new size.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(
        self,
        num_samples: int,
        global_size: int,
        micro_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if num_samples < 1:
            raise DataError(
                "the data set has no samples", "a run needs at least one sample", "give data.train or data.eval samples"
            )
        self.num_samples, self.global_size, self.micro_size = num_samples, global_size, micro_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle = seed, shuffle
        self.origin = Position()
        # Two epochs: at the end of one, prefetching is in the next while training is still in this one.
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one pass over the data, the short last one included."""
        return -(-self.num_samples // self.global_size)

    def position(self, step: int) -> Position:
        """Position at which `step` (from 0) begins, in constant time.

        Raises:
            ValueError: It lies before the origin.
        """
        since = step - self.origin.step
        if since < 0:
            raise ValueError(f"step {step} lies before the origin {self.origin}")
        first = self._steps_to_end_of(self.origin)
        if since < first:
            return Position(step, self.origin.epoch, self.origin.start + since * self.global_size)
        epochs, batch = divmod(since - first, self.steps_per_epoch)
        return Position(step, self.origin.epoch + 1 + epochs, batch * self.global_size)

    def _steps_to_end_of(self, position: Position) -> int:
        return -(-(self.num_samples - position.start) // self.global_size)

    def epochs_before(self, step: int) -> float:
        """Epochs before `step`; the fraction counts the batches of the current epoch."""
        _, epoch, start = self.position(step)
        return epoch + start / self.global_size / self.steps_per_epoch

    def steps_of(self, epochs: int) -> int:
        """Steps of a run of `epochs` passes over the data, including those before the origin."""
        later = epochs - self.origin.epoch - 1
        return self.origin.step + max(0, self._steps_to_end_of(self.origin) + later * self.steps_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """What another sampler needs to continue from any step of this one; JSON."""
        return {"num_samples": self.num_samples, "global_size": self.global_size, "origin": list(self.origin)}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continues the order of the sampler that `state` describes at `step`, perhaps with another global size."""
        before = GlobalBatchSampler(state["num_samples"], state["global_size"], 1)
        before.origin = Position(*state["origin"])
        self.origin = before.origin if state["global_size"] == self.global_size else before.position(step)

    def global_batch(self, step: int) -> list[int]:
        """Sample indices of `step` over all ranks, in order."""
        _, epoch, start = self.position(step)
        return self._order(epoch)[start : start + self.global_size].tolist()

    def microbatches(self, step: int) -> list[list[int]]:
        """This rank's micro-batches of `step`.

        Every rank gets `num_microbatches` of them, so that collectives match. In a short batch some are short or
        empty: the loader fills an empty one with a sample without labels.
        """
        samples = self.global_batch(step)
        stride = self.micro_size * self.dp_size
        first = self.dp_rank * self.micro_size
        return [samples[i + first : i + first + self.micro_size] for i in range(0, len(samples), stride)]

    def num_microbatches(self, step: int) -> int:
        """Micro-batches that every rank gets of `step`: ceil(samples / (micro_size x dp_size))."""
        samples = min(self.global_size, self.num_samples - self.position(step).start)
        return -(-samples // (self.micro_size * self.dp_size))

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
