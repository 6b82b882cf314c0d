"""Tokenises conversations and marks the assistant's tokens, which are found by position, not by text search."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from ds_trainer.data.readers import Origin, kind_of
from ds_trainer.errors import DataError

Span = tuple[int, int]

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\b")


def encode_chat(
    messages: Any, first: int, tokenizer: Any, template: str | None, origin: Origin
) -> tuple[list[int], list[bool]]:
    """Tokenises a conversation and marks the tokens of the assistant's turns from message `first` on.

    A template with `{% generation %}` markers marks what the assistant wrote. Without markers a turn is the text that
    rendering the turn adds after the generation prompt, up to and including the end-of-turn token.

    Args:
        messages: List of `{"role": ..., "content": ...}`; `[]` gives no tokens.
        first: Assistant turns before this index are context only.
        tokenizer: A fast Hugging Face tokenizer.
        template: Jinja template to use in place of the tokenizer's.
        origin: Name of the conversation in error texts.

    Returns:
        Token ids, and for each whether it is learned.

    Raises:
        DataError: Messages of a wrong shape, no chat template, or one that fails on or rewrites the conversation.
    """
    _check(messages, origin)
    if not messages:
        return [], []
    chat = _Conversation(messages, tokenizer, _template(tokenizer, template, origin), origin)
    if GENERATION_MARKER.search(chat.template):
        start = len(chat.prefix(first)) if first else 0
        ids, offsets, marked = chat.tokenise_marked()
        return ids, [bool(mark) and begin >= start for mark, (begin, _) in zip(marked, offsets, strict=True)]
    turns = [chat.turn(i) for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    ids, offsets = chat.tokenise()
    # A token that begins before a turn holds text of the previous one too, so it is not learned.
    return ids, [any(start <= begin < stop for start, stop in turns) for begin, _ in offsets]


def encode_chat_prompt(messages: list[dict[str, str]], tokenizer: Any, origin: Origin) -> list[int]:
    """Tokenises a conversation with the generation prompt at its end, for the model to continue.

    Raises:
        DataError: Messages of a wrong shape, no chat template, or one that fails on the conversation.
    """
    _check(messages, origin)
    chat = _Conversation(messages, tokenizer, _template(tokenizer, None, origin), origin)
    return chat.tokenise_prompt()


class _Conversation:
    """Renders one conversation or its first messages, and turns errors of the template into data errors."""

    def __init__(self, messages: list[dict[str, Any]], tokenizer: Any, template: str, origin: Origin) -> None:
        self.messages, self.tokenizer, self.template, self.origin = messages, tokenizer, template, origin

    @cached_property
    def text(self) -> str:
        return self._render(len(self.messages))

    def tokenise(self) -> tuple[list[int], list[Span]]:
        out = self.tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return out["input_ids"], out["offset_mapping"]

    def tokenise_prompt(self) -> list[int]:
        text = self._render(len(self.messages), add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def tokenise_marked(self) -> tuple[list[int], list[Span], list[int]]:
        out = self._apply(
            len(self.messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        return out["input_ids"], out["offset_mapping"], out["assistant_masks"]

    def prefix(self, stop: int, add_generation_prompt: bool = False) -> str:
        """The first `stop` messages rendered, which must be a prefix of the rendered conversation.

        Raises:
            DataError: The template renders them differently when more messages follow.
        """
        text = self._render(stop, add_generation_prompt)
        if not self.text.startswith(text):
            raise DataError(
                f"{self.origin}: the chat template renders the first {stop} of {len(self.messages)} messages "
                "differently alone than within the conversation",
                "an assistant turn is found by rendering the conversation up to it, so a template may alter earlier "
                "turns only if it has {% generation %} markers",
                "set data.chat_template to a template with {% generation %} markers",
            )
        return text

    def turn(self, i: int) -> Span:
        """Start and stop of assistant turn `i` in the text, after the generation prompt up to its end-of-turn token."""
        after = self.prefix(i + 1)
        if i > 0:
            start = len(self.prefix(i, add_generation_prompt=True))
        else:  # no message precedes the turn: render the generation prompt after it to know its text
            header = self._render(1, add_generation_prompt=True).removeprefix(after)
            start = after.find(header) + len(header)
        # Templates end a turn with a token and a newline; the model stops at the token and writes no newline.
        trimmed = after.rstrip()
        closed = trimmed.endswith(tuple(self.tokenizer.all_special_tokens))
        return start, len(trimmed if closed else after)

    def _render(self, stop: int, add_generation_prompt: bool = False) -> str:
        return self._apply(stop, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, stop: int, **kwargs: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(self.messages[:stop], chat_template=self.template, **kwargs)
        except TemplateError as error:
            raise DataError(
                f"{self.origin}: the chat template fails on the conversation: {error}",
                "a conversation must follow its template's rules",
                "fix the record, or set data.chat_template",
            ) from error


def _template(tokenizer: Any, template: str | None, origin: Origin) -> str:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{origin} is a conversation, and a {type(tokenizer).__name__} gives no character offsets",
            "the offsets of a fast tokenizer say which tokens are the assistant's",
            "set model.tokenizer to one with a tokenizer.json, or give records with input_ids and labels",
        )
    try:
        return tokenizer.get_chat_template(template)
    except ValueError as error:
        raise DataError(
            f"{origin} is a conversation, and the tokenizer has no chat template",
            "records of messages are rendered by a chat template",
            "set data.chat_template to a Jinja file, or model.tokenizer to an instruct model's",
        ) from error


def _check(messages: Any, origin: Origin) -> None:
    faults = [f"messages is {kind_of(messages)}"] if not isinstance(messages, list) else []
    for i, message in enumerate(messages if not faults else []):
        if not isinstance(message, dict):
            faults.append(f"message {i} is {kind_of(message)}")
        else:
            faults += [
                f"{key!r} of message {i} is {kind_of(message.get(key))}"
                for key in ("role", "content")
                if not isinstance(message.get(key), str)
            ]
    if faults:
        raise DataError(
            f"{origin}: {faults[0]}",
            'a conversation is a list of {"role": str, "content": str}',
            "reshape the record's messages",
        )
