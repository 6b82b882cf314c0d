"""Makes the loaders of a run: training, evaluation and test data, from files or data set objects, for this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_trainer.config.schema import RunConfig
from ds_trainer.data.collate import pad_collate, padding_id
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.prepare import prepare
from ds_trainer.data.readers import require_map_style
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.data.tokenized import TokenizedDataset, preview
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.log import get_logger


@dataclass(frozen=True)
class LoaderFactory:
    """Makes the loaders of a run.

    Args:
        config: A resolved config.
        grid: This rank's position among the ranks.
        tokenizer: Tokenizer; None where samples are tokenised already.
        collator: The user's collator; None: padding on the right.
        vocab_size: Rows of the model's embedding, the upper bound of ids; None: unchecked.
        max_positions: Longest sequence the model takes; None: unchecked.
    """

    config: RunConfig
    grid: Grid
    tokenizer: Any = None
    collator: Callable | None = None
    vocab_size: int | None = None
    max_positions: int | None = None

    def train(self, dataset: Any) -> BatchLoader | None:
        """The loader of `dataset`, or of `data.train`; None where there is neither.

        Raises:
            DataError: The data cannot be read or teaches nothing.
        """
        prepared = self._prepared(dataset, self.config.data.train, "train")
        batch = self.config.batch
        assert batch.global_size is not None and batch.micro_size is not None
        return self._loader(prepared, batch.global_size, batch.micro_size, "train")

    def eval(self, dataset: Any, what: str = "eval") -> BatchLoader | None:
        """The loader of `dataset`, or of `data.eval`, in the data's own order; None where there is neither."""
        prepared = self._prepared(dataset, self.config.data.eval, what)
        size = self.config.evaluation.batch_size
        assert size is not None
        return self._loader(prepared, size * self.grid.dp_size, size, what)

    def test(self, dataset: Any) -> BatchLoader:
        """The loader of a data set to predict on, in its own order, in batches as for evaluation."""
        loader = self.eval(dataset, "test")
        assert loader is not None
        return loader

    def _loader(self, dataset: Any, global_size: int, micro_size: int, what: str) -> BatchLoader | None:
        if dataset is None:
            return None
        data, grid, seed, is_train = self.config.data, self.grid, self.config.run.seed, what == "train"
        assert data.pin_memory is not None
        draws_nothing = isinstance(dataset, TokenizedDataset) and self.collator is None
        return BatchLoader(
            dataset,
            GlobalBatchSampler(
                len(dataset), global_size, micro_size, grid.dp_rank, grid.dp_size, seed, data.shuffle and is_train
            ),
            self.collator or self._pad,
            num_workers=data.num_workers,
            prefetch_factor=data.prefetch_factor,
            pin_memory=data.pin_memory,
            one_pass=not is_train,
            seed=None if draws_nothing else seed,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            what=what,
        )

    def _pad(self, features: list) -> dict:
        return pad_collate(features, padding_id(self.tokenizer))

    def _prepared(self, dataset: Any, paths: Any, what: str) -> Any:
        """A data set that the user gives together with a collator, unchanged; any other tokenised."""
        source = paths if dataset is None else dataset
        if source is None:
            return None
        if dataset is not None and self.collator is not None:
            require_map_style(dataset, what)
            return dataset
        data = self.config.data
        tokenized = prepare(
            source, self.tokenizer, data, vocab_size=self.vocab_size, max_positions=self.max_positions, what=what
        )
        get_logger().info("data.%s: %s", what, tokenized.stats)
        if what == "train" and data.preview_samples and self.tokenizer is not None:
            get_logger().info("%s", preview(tokenized, self.tokenizer, data.preview_samples))
        return tokenized
