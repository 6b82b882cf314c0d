"""The order of samples: a sequence of global batches that depends on the seed alone. Pure.

Ranks, micro-batches and accumulation only cut a global batch up, so the same run on another layout sees the same
samples at the same step.
"""

from __future__ import annotations

import numpy as np

from ds_trainer.errors import DataError


class GlobalBatchSampler:
    """Indices of any step in constant time; a step is a global batch, cut into this rank's micro-batches.

    The last batch of an epoch is short where `global_size` does not divide `num_samples`: nothing is repeated, nothing
    is skipped, and an epoch has ceil(num_samples / global_size) steps.

    Example:
        10 samples, global size 8, micro size 2, 2 data ranks, no shuffling. Step 1 holds samples 8 and 9; rank 0 gets
        `[[8, 9]]` and rank 1 gets `[[]]`.

    Args:
        num_samples: Length of the data set.
        global_size: Samples per step over all ranks.
        micro_size: Samples per forward pass of one rank.
        data_rank: This rank's number among the data ranks.
        data_ranks: Number of data ranks.
        seed: Seed of the permutations.
        shuffle: Draw a new permutation each epoch; False: the data set's own order.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(
        self,
        num_samples: int,
        global_size: int,
        micro_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if num_samples < 1:
            raise DataError(
                "the data set has no samples", "a run needs at least one sample", "give data.train or data.eval samples"
            )
        self.num_samples, self.global_size, self.micro_size = num_samples, global_size, micro_size
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.seed, self.shuffle = seed, shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one pass over the data, the short last one included."""
        return -(-self.num_samples // self.global_size)

    def epoch_of(self, step: int) -> int:
        """The pass over the data, from 0, that `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def global_batch(self, step: int) -> list[int]:
        """Sample indices of `step` over all ranks, in order."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.global_size
        return self._order(epoch)[start : start + self.global_size].tolist()

    def microbatches(self, step: int) -> list[list[int]]:
        """This rank's micro-batches of `step`.

        Every rank gets ceil(samples / (micro_size x data_ranks)) of them, so that collectives pair up. In a short batch
        some are short or empty: the loader puts a filler without labels there.
        """
        samples = self.global_batch(step)
        stride = self.micro_size * self.data_ranks
        first = self.data_rank * self.micro_size
        return [samples[i + first : i + first + self.micro_size] for i in range(0, len(samples), stride)]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        if self._cached is None or self._cached[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
            self._cached = (epoch, order)
        return self._cached[1]
