"""This rank's micro-batches of every step, read in order or from any step on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from ds_trainer.data.microbatch import BatchMaker, Collator, MapDataset, MicroBatch, Task
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.data.worker_error import FailedBatch
from ds_trainer.data.workers import BatchStream


class BatchLoader:
    """This rank's micro-batches of any step.

    Args:
        dataset: Map-style samples.
        sampler: Gives the samples of each step.
        collate_fn: Makes a batch of a list of samples, as in Hugging Face (`data_collator`).
        num_workers: Processes that read and collate; 0: this one.
        prefetch_factor: Micro-batches that each worker prefetches.
        pin_memory: Return batches in page-locked memory.
        one_pass: The data set is read once, from step 0 on: workers end after its last step.
        maker: Further arguments of `BatchMaker`.

    Attributes:
        input_wait_s: Seconds that this process has waited for micro-batches so far.
    """

    def __init__(
        self,
        dataset: MapDataset,
        sampler: GlobalBatchSampler,
        collate_fn: Collator,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        one_pass: bool = False,
        **maker: Any,
    ) -> None:
        self.sampler = sampler
        self.maker = BatchMaker(dataset, collate_fn, **maker)
        self.input_wait_s = 0.0
        self._reading = (num_workers, prefetch_factor, pin_memory)
        self._one_pass = one_pass
        self._stream: BatchStream | None = None
        self._next_step: int | None = None
        """The step whose first micro-batch the stream returns next; None: it is inside a step."""

    def step(self, k: int) -> Iterator[MicroBatch]:
        """The micro-batches of step `k`, as many on every rank.

        Consecutive steps are prefetched; any other step starts in constant time, without reading those between.
        Where the short last batch of an epoch leaves this rank without samples, it gets one real sample with all
        labels at -100: the pass adds nothing to the loss, and runs so that collectives match.

        Raises:
            DataError: Ids beyond the embedding, a sequence beyond the model's positions, or a batch without labels.
            MachineError: A worker process has ended.
        """
        started = time.perf_counter()
        stream = self._stream_at(k)
        for left in reversed(range(self.sampler.num_microbatches(k))):
            batch = next(stream)
            if left == 0:
                self._finished(k)
            self.input_wait_s += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def single(self, sample: int) -> MicroBatch:
        """A micro-batch of one sample, outside any step."""
        made = self.maker[Task(0, 0, [sample])]
        if isinstance(made, FailedBatch):
            made.reraise()
        return made

    def close(self) -> None:
        """Ends the workers; a later step starts new ones."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._next_step = None

    def _stream_at(self, k: int) -> BatchStream:
        """The stream at the first micro-batch of step `k`, restarted if need be; inside it until `_finished`."""
        if self._stream is None or self._next_step != k:
            self.close()
            self._stream = BatchStream(self.maker, self._tasks(k), *self._reading)
        self._next_step = None
        return self._stream

    def _finished(self, k: int) -> None:
        self._next_step = k + 1
        if self._one_pass and self._next_step == self.sampler.steps_per_epoch:
            self.close()

    def _tasks(self, first: int) -> Iterator[Task]:
        """The micro-batches to make from step `first` on."""
        for step in range(first, self.sampler.steps_per_epoch) if self._one_pass else count(first):
            epoch, filler = self.sampler.position(step).epoch, self.sampler.global_batch(step)[:1]
            for samples in self.sampler.microbatches(step):
                yield Task(step, epoch, samples or filler, is_filler=not samples)
