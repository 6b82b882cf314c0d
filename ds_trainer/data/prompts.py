"""Prompts: tokens for a model to continue, and for a sample of a data set the answer that follows there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

import torch

from ds_trainer.data.chat import encode_chat_prompt
from ds_trainer.data.encode import tokenise
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.readers import Origin, kind_of
from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Prompt:
    """The tokens of a sample before its first learned one, and the answer that follows.

    Args:
        index: The sample's place in its data set.
        input_ids: Tokens before the first learned one.
        reference_ids: The learned tokens that follow, up to the next one that is not learned.
    """

    index: int
    input_ids: list[int]
    reference_ids: list[int]


def first_prompts(loader: BatchLoader, count: int) -> list[Prompt]:
    """The prompts of a data set's first samples, fewer than `count` where it has no more.

    Raises:
        DataError: A sample has no prompt, or the collator's batches hold no labelled tokens.
    """
    return [_prompt(i, loader.single(i)) for i in range(min(count, loader.sampler.num_samples))]


def _prompt(index: int, batch: dict[str, Any]) -> Prompt:
    ids, labels = batch.get("input_ids"), batch["labels"]
    if ids is None or ids.shape != labels.shape:
        shapes = {key: list(value.shape) for key, value in batch.items() if torch.is_tensor(value)}
        raise DataError(
            f"evaluation.generate_samples: the batch of evaluation sample {index} has {shapes}",
            "a prompt is found in input_ids by labels of the same shape",
            "set evaluation.generate_samples to 0, or return both from data_collator",
        )
    present = batch.get("attention_mask", torch.ones_like(ids))[0].bool()
    pairs = list(zip(ids[0][present].tolist(), labels[0][present].tolist(), strict=True))
    prompt = [token for token, _ in takewhile(lambda pair: pair[1] == IGNORE_INDEX, pairs)]
    if not prompt:
        raise DataError(
            f"evaluation.generate_samples: evaluation sample {index} has no prompt: its first token is learned already",
            "a prompt is what stands before the first learned token",
            "set evaluation.generate_samples to 0, or give data.eval records of prompt and completion, or of messages",
        )
    answer = takewhile(lambda pair: pair[1] != IGNORE_INDEX, dropwhile(lambda pair: pair[1] == IGNORE_INDEX, pairs))
    return Prompt(index, prompt, [token for token, _ in answer])


def encode_prompt(prompt: str | Sequence[dict[str, str]], tokenizer: Any, origin: Origin) -> list[int]:
    """Tokenises what a model is to continue: a text, or a conversation with the generation prompt after it.

    Args:
        prompt: A text, or messages.
        tokenizer: A Hugging Face tokenizer.
        origin: Name of the prompt in error texts.

    Raises:
        DataError: It is neither, holds no token, or its conversation cannot be rendered.
    """
    match prompt:
        case str():
            ids = tokenise(prompt, tokenizer)
        case list() | tuple():
            ids = encode_chat_prompt(list(prompt), tokenizer, origin)
        case _:
            raise DataError(
                f"{origin} is {kind_of(prompt)}",
                'a prompt is a text or a list of {"role": str, "content": str}',
                "reshape the prompt",
            )
    if not ids:
        raise DataError(f"{origin} holds no token", "a model continues at least one token", "give it some text")
    return ids
