"""The built-in collator: pads samples on the right, by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX

PADDED_KEYS = {"input_ids", "labels", "attention_mask"}


def padding_id(tokenizer: Any) -> int:
    """The id of padding: pad, else eos, else 0. Padding is masked by position, so any valid id will do."""
    return next((i for name in ("pad", "eos") if (i := getattr(tokenizer, f"{name}_token_id", None)) is not None), 0)


def pad_collate(features: list[Mapping[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pads samples on the right to the longest of them.

    Lengths decide what is padding, never ids, so an end token that is also the pad token stays learned.

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
        torch.as_tensor(feature.get("labels", ids)).masked_fill(mask == 0, IGNORE_INDEX)
        for feature, ids, mask in zip(features, input_ids, masks, strict=True)
    ]
    return {
        "input_ids": pad_sequence(input_ids, batch_first=True, padding_value=pad_token_id).long(),
        "attention_mask": pad_sequence(masks, batch_first=True, padding_value=0).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX).long(),
    }
