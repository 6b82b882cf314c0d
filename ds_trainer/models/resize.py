"""Grows embeddings to the tokenizer's length: new rows are the mean of the old ones, the same on every rank.

With the mean the model's predictions of old tokens hardly change.
Source: J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021).
"""

from __future__ import annotations

from math import prod

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ModelError
from ds_trainer.layout import TensorSlice
from ds_trainer.log import get_logger
from ds_trainer.models.weight_source import WeightSource


class ResizedEmbeddings(WeightSource):
    """A `WeightSource` that adds rows to the embeddings of another one.

    Args:
        weights: The other source.
        grown: Name -> shape in that source and new shape, which has more rows.
    """

    def __init__(self, weights: WeightSource, grown: dict[str, tuple[torch.Size, torch.Size]]) -> None:
        self._weights = weights
        self._grown = grown
        self._means: dict[str, torch.Tensor] = {}

    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """See `WeightSource.view`; the mean reads all old rows, once, and is kept in fp32."""
        if name not in self._grown:
            return self._weights.view(name, flat)
        old, new = self._grown[name]
        start, stop = (0, prod(new)) if flat is None else flat
        old_stop = prod(old)
        kept = self._weights.view(name, (min(start, old_stop), min(stop, old_stop)))
        if stop <= old_stop:
            return kept
        tail = self._mean(name).expand(new[0] - old[0], *new[1:]).reshape(-1)
        value = torch.cat([kept.float(), tail[max(start - old_stop, 0) : stop - old_stop]])
        return value.view(new) if flat is None else value

    def read_slice(self, name: str, wanted: TensorSlice) -> torch.Tensor:
        """See `WeightSource`; reads only the old rows that the slice holds."""
        if name not in self._grown:
            return self._weights.read_slice(name, wanted)
        rows, (first, count) = self._grown[name][0][0], (wanted.offsets[0], wanted.sizes[0])
        num_old = min(max(rows - first, 0), count)
        old = self._weights.read_slice(name, wanted.along(0, min(first, rows), num_old))
        if num_old == count:
            return old
        new = self._mean(name)[wanted.index[1:]].expand(count - num_old, *wanted.sizes[1:])
        return torch.cat([old.float(), new])

    def _mean(self, name: str) -> torch.Tensor:
        if name not in self._means:
            self._means[name] = self._weights.read(name, torch.float32).mean(0)
        return self._means[name]

    def stored_dtype(self, name: str) -> torch.dtype:
        """See `WeightSource`."""
        return self._weights.stored_dtype(name)


def resize_embeddings_to_fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: WeightSource | None,
    config: ModelConfig,
) -> WeightSource | None:
    """Grows the embedding and the head in place where the tokenizer has more tokens than the embedding has rows.

    Args:
        model: Skeleton, or a model with its values.
        tokenizer: Tokenizer of the run.
        weights: Source of the skeleton's values, opened before the call; None when `model` has its values.
        config: The config's model section.

    Returns:
        The source to load from: `weights`, or one that adds the new rows.

    Raises:
        ModelError: The tokenizer has ids beyond the embedding and `model.resize_embeddings` is off.
    """
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed <= rows:
        return weights
    if not config.resize_embeddings:
        raise ModelError(
            f"the tokenizer has ids up to {needed - 1}, the embedding of {type(model).__name__} has {rows} rows",
            "every token id must be a row of the embedding",
            "set model.resize_embeddings to true, or model.tokenizer to the checkpoint's own tokenizer",
        )
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    model.resize_token_embeddings(needed, pad_to_multiple_of=config.pad_embeddings_to_multiple_of, mean_resizing=False)
    grown = {n: (before[n], t.shape) for n, t in model.state_dict().items() if t.shape != before[n]}
    get_logger().info(
        "embeddings grown from %d to %d rows for %d tokens: %s",
        rows,
        model.config.get_text_config().vocab_size,
        needed,
        ", ".join(grown),
    )
    if weights is not None:
        return ResizedEmbeddings(weights, grown)
    for name in grown:
        value = model.state_dict()[name]
        value[rows:] = value[:rows].float().mean(0).to(value.dtype)
    return None
