"""Turns a record into token ids and labels; decides token by token which are learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from operator import index
from typing import Any

from ds_trainer.data.chat import encode_chat
from ds_trainer.data.readers import Origin, Record, kind_of
from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Encoded:
    """Tokens of one sample.

    Args:
        input_ids: Token ids.
        labels: The same ids where they are learned, -100 elsewhere; not shifted.
    """

    input_ids: list[int]
    labels: list[int]

    @property
    def num_label_tokens(self) -> int:
        """Tokens that the loss counts. The first token is never predicted, so its label does not count."""
        return sum(label != IGNORE_INDEX for label in self.labels[1:])


def encode(record: Record, tokenizer: Any, chat_template: str | None, origin: Origin) -> Encoded:
    """Tokenises one record.

    `text`: everything is learned. `prompt` and `completion`: the completion is learned, and where both are lists of
    messages, its assistant turns. `messages`: the assistant turns are learned. `input_ids`: `labels`, or everything.
    An end-of-sequence token is appended to `text` and `completion`; a chat template writes its own.

    Args:
        record: The record.
        tokenizer: A Hugging Face tokenizer; None does for `input_ids`.
        chat_template: Jinja template to use in place of the tokenizer's.
        origin: Name of the record in error texts.

    Returns:
        The sample; it has no tokens where the record holds no text.

    Raises:
        DataError: The record has a wrong shape, or its conversation cannot be rendered.
    """
    if not isinstance(record, Mapping):
        raise _wrong_shape(origin, f"the record is {kind_of(record)}")
    match {key: value for key, value in record.items() if value is not None}:
        case {"input_ids": input_ids, **rest}:
            return _encode_ids(input_ids, rest, origin)
        case present if tokenizer is None:
            raise DataError(
                f"{origin}: the record has the keys {sorted(present)}, and there is no tokenizer",
                "records other than input_ids become tokens through a tokenizer",
                "set model.tokenizer, or pass Trainer(processing_class=...)",
            )
        case {"messages": messages}:
            return _masked(*encode_chat(messages, 0, tokenizer, chat_template, origin))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return _encode_completion(prompt, completion, tokenizer)
        case {"prompt": list(prompt), "completion": list(completion)}:
            return _masked(*encode_chat(prompt + completion, len(prompt), tokenizer, chat_template, origin))
        case {"prompt": prompt, "completion": completion}:
            raise _wrong_shape(origin, f"prompt is {kind_of(prompt)}, completion {kind_of(completion)}")
        case {"text": str(text)}:
            ids = _ended(tokenise(text, tokenizer), tokenizer) if text else []
            return Encoded(ids, list(ids))
        case {"text": text}:
            raise _wrong_shape(origin, f"text is {kind_of(text)}")
        case present:
            raise _wrong_shape(origin, f"the record has the keys {sorted(present)}")


def _encode_ids(input_ids: Any, rest: dict[str, Any], origin: Origin) -> Encoded:
    """Takes the given tokens without the padding that an attention mask marks."""
    ids = _ints(input_ids, origin)
    labels = _ints(rest["labels"], origin) if "labels" in rest else ids
    mask = _ints(rest["attention_mask"], origin) if "attention_mask" in rest else [1] * len(ids)
    if not len(ids) == len(labels) == len(mask):
        raise _wrong_shape(origin, f"{len(ids)} input_ids, {len(labels)} labels, {len(mask)} attention_mask")
    return Encoded(list(compress(ids, mask)), list(compress(labels, mask)))


def _ints(values: Any, origin: Origin) -> list[int]:
    try:
        return [index(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError as error:
        raise _wrong_shape(origin, f"input_ids, labels or attention_mask is no flat list of ints ({error})") from error


def _encode_completion(prompt: str, completion: str, tokenizer: Any) -> Encoded:
    """Joins the two texts' tokens such that no token holds characters of both.

    These are the tokens of the joined text if they begin with those of the prompt. Where a token would span the
    boundary, prompt and completion are tokenised separately, as the model sees them when it continues the prompt.
    """
    if not prompt and not completion:
        return Encoded([], [])
    head, ids = tokenise(prompt, tokenizer), tokenise(prompt + completion, tokenizer)
    if ids[: len(head)] != head:
        ids = head + tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
    ids = _ended(ids, tokenizer)
    return Encoded(ids, [IGNORE_INDEX] * len(head) + ids[len(head) :])


def tokenise(text: str, tokenizer: Any) -> list[int]:
    """Ids with the tokenizer's own beginning-of-sequence token, and without the end token that some tokenizers add."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    eos = tokenizer.eos_token
    return ids[:-1] if eos and ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(eos) else ids


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Ids that end with the end-of-sequence token, where the tokenizer has one."""
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _masked(ids: list[int], learned: list[bool]) -> Encoded:
    return Encoded(ids, [i if keep else IGNORE_INDEX for i, keep in zip(ids, learned, strict=True)])


def _wrong_shape(origin: Origin, found: str) -> DataError:
    return DataError(
        f"{origin}: {found}",
        'a record is {"text": str}, {"prompt": str, "completion": str}, {"messages": [{"role": str, "content": str}]} '
        'or {"input_ids": [int], "labels": [int]}; prompt and completion may both be lists of messages',
        "rename or reshape the record's fields",
    )
