"""Makes one micro-batch: reads, collates and checks its samples, in a worker or in the training process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ds_trainer.data.seeding import preserved_rng, seed_rngs
from ds_trainer.data.worker_error import FailedBatch, error_note
from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX

MicroBatch = dict[str, Any]
Collator = Callable[[list[Any]], MicroBatch]

SAMPLE, COLLATOR = range(2)
"""First element of a seed's key: samples and collators draw from separate streams."""


class MapDataset(Protocol):
    """A data set with a length and an index."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, i: int, /) -> Any:
        """Sample `i`."""


@dataclass(frozen=True)
class Task:
    """Which micro-batch to make.

    Args:
        step: The step it belongs to, from 0.
        epoch: The pass over the data, from 0.
        samples: Indices of its samples.
        is_filler: Whether its labels are set to -100, since the samples belong to another rank.
    """

    step: int
    epoch: int
    samples: list[int]
    is_filler: bool = False


class BatchMaker:
    """Makes micro-batches; map-style from task to batch, so that torch's `DataLoader` can run it.

    Args:
        dataset: Map-style samples.
        collate_fn: Makes a batch of a list of samples, as in Hugging Face (`data_collator`).
        seed: Seeds the global generators of Python, NumPy and torch: together with epoch and index before a sample is
            read, with step and first index before samples are collated. So augmentation is the same for any number of
            ranks and workers. None: nothing is random, so nothing is seeded.
        vocab_size: Rows of the model's embedding; None: unchecked.
        max_positions: Longest sequence the model takes; None: unchecked.
        what: `train`, `eval` or `test`, for error texts.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: Collator,
        *,
        seed: int | None = None,
        vocab_size: int | None = None,
        max_positions: int | None = None,
        what: str = "train",
    ) -> None:
        self.dataset, self.collate_fn, self.seed, self.what = dataset, collate_fn, seed, what
        self.vocab_size, self.max_positions = vocab_size, max_positions

    def __getitem__(self, task: Task) -> MicroBatch | FailedBatch:
        """The batch, or the error that the user's code or a check raised, with notes that name step and samples."""
        try:
            with error_note(f"in data.{self.what}, step {task.step + 1}, samples {task.samples}"), self._rng_context():
                return self._make(task)
        except Exception as error:  # noqa: BLE001  a data set may raise any error; the training process raises it again
            return FailedBatch(error)

    def sample(self, i: int, epoch: int = 0) -> Any:
        """Sample `i` as the given epoch sees it. The caller preserves the random number generators."""
        if self.seed is not None:
            seed_rngs(SAMPLE, self.seed, epoch, i)
        with error_note(f"while reading sample {i}"):
            return self.dataset[i]

    def _rng_context(self) -> Any:
        return nullcontext() if self.seed is None else preserved_rng()

    def _make(self, task: Task) -> MicroBatch:
        samples = [self.sample(i, task.epoch) for i in task.samples]
        if self.seed is not None:
            seed_rngs(COLLATOR, self.seed, task.step, task.samples[0])
        batch = self.collate_fn(samples)
        if "labels" not in batch:
            raise DataError(
                f"the data collator returns no labels for samples {task.samples}, only {sorted(batch)}",
                "the loss is divided by the labels of the whole step, so every batch has labels",
                "return labels from data_collator, -100 where nothing is to be learned",
            )
        self._check(batch, task.samples)
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)} if task.is_filler else batch

    def _check(self, batch: MicroBatch, samples: list[int]) -> None:
        ids = batch.get("input_ids")
        if ids is None:
            return
        if self.max_positions is not None and ids.shape[-1] > self.max_positions:
            raise DataError(
                f"samples {samples} have {ids.shape[-1]} tokens, the model has {self.max_positions} positions",
                "a sample may not be longer than the model's positions",
                "shorten the samples, or set data.max_length",
            )
        if self.vocab_size is not None and int(ids.max()) >= self.vocab_size:
            raise DataError(
                f"samples {samples} have token id {int(ids.max())}, the model's embedding has {self.vocab_size} rows",
                "ids lie between 0 and the number of rows less one",
                "set model.resize_embeddings to true, or model.tokenizer to the one that belongs to the checkpoint",
            )
