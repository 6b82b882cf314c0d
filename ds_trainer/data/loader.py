"""Samples become batches: padding by position, and a step's micro-batches for this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.data.text import IGNORE
from ds_trainer.errors import DataError

Batch = dict[str, Any]
Collator = Callable[[list[Any]], Batch]

PADDED_KEYS = {"input_ids", "labels", "attention_mask"}


class MapDataset(Protocol):
    """What a loader reads samples from."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, i: int, /) -> Any:
        """Sample `i`."""


def padding_id(tokenizer: Any) -> int:
    """The id that fills up short rows. Padding is masked by position, so any valid id does: pad, else eos, else 0."""
    return next((i for name in ("pad", "eos") if (i := getattr(tokenizer, f"{name}_token_id", None)) is not None), 0)


def pad_collate(features: list[Mapping[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pads samples on the right to the longest of them.

    What is padding is known from the lengths and never from the ids, so an end token that doubles as pad stays learned.

    Args:
        features: Samples with `input_ids` and perhaps `labels` (default: all tokens learned) and `attention_mask`.
        pad_token_id: Fills up `input_ids`.

    Shapes:
        All results are (samples, longest), int64: `input_ids`, `attention_mask` (1 on tokens) and `labels` (-100 on
        padding).

    Raises:
        DataError: A sample lacks `input_ids` or has keys that this collator would have to drop.
    """
    for feature in features:
        if not isinstance(feature, Mapping) or "input_ids" not in feature or not feature.keys() <= PADDED_KEYS:
            found = sorted(feature) if isinstance(feature, Mapping) else type(feature).__name__
            raise DataError(
                f"a sample to be padded has {found}",
                f"the built-in collator takes input_ids and optionally the others of {sorted(PADDED_KEYS)}",
                "remove the other columns, or give Trainer(data_collator=...)",
            )
    input_ids = [torch.as_tensor(feature["input_ids"]) for feature in features]
    masks = [
        torch.as_tensor(feature.get("attention_mask", torch.ones_like(ids)))
        for feature, ids in zip(features, input_ids, strict=True)
    ]
    labels = [
        torch.as_tensor(feature.get("labels", ids)).masked_fill(mask == 0, IGNORE)
        for feature, ids, mask in zip(features, input_ids, masks, strict=True)
    ]
    return {
        "input_ids": pad_sequence(input_ids, batch_first=True, padding_value=pad_token_id).long(),
        "attention_mask": pad_sequence(masks, batch_first=True, padding_value=0).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE).long(),
    }


class BatchLoader:
    """This rank's micro-batches of any step.

    Args:
        dataset: Map-style samples.
        sampler: Says which samples a step holds.
        collate_fn: Makes a batch of a list of samples, as in Hugging Face (`data_collator`).
        vocab_size: Rows of the model's embedding; None: unchecked.
        max_positions: Longest sequence the model takes; None: unchecked.

    Attributes:
        input_wait_s: Seconds spent reading and collating so far.
    """

    def __init__(
        self,
        dataset: MapDataset,
        sampler: GlobalBatchSampler,
        collate_fn: Collator,
        *,
        vocab_size: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        self.dataset, self.sampler, self.collate_fn = dataset, sampler, collate_fn
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.input_wait_s = 0.0

    def step(self, k: int) -> Iterator[Batch]:
        """The micro-batches of step `k`, as many on every rank.

        Where the short last batch of an epoch leaves this rank without samples, it gets one real sample with every
        label at -100: the pass runs, so that collectives pair up, and adds nothing.

        Raises:
            DataError: Ids beyond the embedding, a sequence beyond the model's positions, or a batch without labels.
        """
        for samples in self.sampler.microbatches(k):
            started = time.perf_counter()
            batch = self._collate(samples) if samples else self._filler(k)
            self._check(batch, samples)
            self.input_wait_s += time.perf_counter() - started
            yield batch

    def _collate(self, samples: list[int]) -> Batch:
        batch = self.collate_fn([self.dataset[i] for i in samples])
        if "labels" not in batch:
            raise DataError(
                f"the data collator returns no labels for samples {samples}, only {sorted(batch)}",
                "the loss is divided by the labels of the whole step, so every batch has labels",
                "return labels from data_collator, -100 where nothing is to be learned",
            )
        return batch

    def _filler(self, k: int) -> Batch:
        batch = self._collate(self.sampler.global_batch(k)[:1])
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORE)}

    def _check(self, batch: Batch, samples: list[int]) -> None:
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
