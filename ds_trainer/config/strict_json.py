"""Text of config files, and strict JSON in it: no repeated key, no NaN, nothing nested without end. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from ds_trainer.errors import ConfigError

MAX_DEPTH = 32
MAX_DIGITS = 400
_MAX_VALUES = 100_000
"""Values on one level of nesting; only YAML's aliases, each of which stands for a whole tree, reach it."""


class TextFault(ValueError):
    """Text that its parser would accept, or fail at without a place, and we do not.

    Args:
        found: What was found, without the file's name.
        rule: The rule it breaks.
        change: What to change.
    """

    def __init__(self, found: str, rule: str, change: str) -> None:
        super().__init__(found)
        self.rule, self.change = rule, change

    def error(self, place: object) -> ConfigError:
        """The error for a user, with the place of the text."""
        return ConfigError(f"{place}: {self}", self.rule, self.change)


def read_text(path: Path) -> str:
    """The text of a config file.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "a config is a readable file", "give the path of one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}",
            "a config is text in UTF-8",
            f"save {path} as UTF-8",
        ) from None


def parse_json(text: str) -> Any:
    """Parses strict JSON. A number such as `5e8` is an integer, as in JSON Schema.

    Raises:
        json.JSONDecodeError: It is no JSON.
        TextFault: A repeated key, NaN, a number or a nesting beyond all use.
    """
    try:
        tree = json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_constant=_refuse_constant,
            parse_float=integer_if_exponent,
            parse_int=short_integer,
        )
    except RecursionError:
        raise too_deep() from None
    check_nesting(tree)
    return tree


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def check_nesting(tree: Any, children: Callable[[Any], Iterable[Any]] = _children) -> None:
    """Refuses a tree that is nested beyond all use, or grows beyond it.

    Args:
        tree: The tree.
        children: The nodes below a node.

    Raises:
        TextFault: It is.
    """
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = list(islice((child for node in level for child in children(node)), _MAX_VALUES + 1))
        if len(level) > _MAX_VALUES:
            rule = f"a config has at most {_MAX_VALUES} values"
            raise TextFault(f"more than {_MAX_VALUES} values, aliases resolved", rule, "write the values that you mean")
    if level:
        raise too_deep()


def too_deep() -> TextFault:
    """The fault of a text that is nested too deep."""
    rule = f"a config nests objects and lists at most {MAX_DEPTH} deep"
    return TextFault(f"nested more than {MAX_DEPTH} deep", rule, "remove the superfluous brackets")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a parser's pairs; raises `TextFault` where a key stands twice."""
    result: dict[str, Any] = {}
    for key, item in pairs:
        if key in result:
            raise twice(key)
        result[key] = item
    return result


def twice(key: str) -> TextFault:
    """The fault of a key that stands twice."""
    return TextFault(f"{key} stands twice in one object", "a key is set once", f"remove one {key}")


def _refuse_constant(text: str) -> float:
    raise TextFault(f"{text} is not a number", "JSON knows finite numbers only", f"replace {text}")


def short_integer(text: str) -> int:
    """The integer that a text spells; raises `TextFault` where it is endless, on which Python's own reader stops."""
    if len(text) > MAX_DIGITS:
        raise TextFault(f"an integer of {len(text)} digits", f"a number has at most {MAX_DIGITS} digits", "shorten it")
    return int(text)


def integer_if_exponent(text: str) -> int | float:
    """The number that a text with point or exponent spells; raises `TextFault` where it would be infinite."""
    number = float(text)
    if math.isinf(number):
        raise TextFault(f"{text} is too large a number", "a number is at most 1.8e308", f"replace {text}")
    is_count = "e" in text.lower() and number.is_integer() and abs(number) < 2**63
    return int(number) if is_count else number
