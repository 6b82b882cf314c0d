"""Text of config files, and strict JSON in it: no repeated key, no NaN. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_trainer.errors import ConfigError


class TextFault(ValueError):
    """Text that breaks a rule of ours, or that its parser fails at without a position.

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
        json.JSONDecodeError: It is not JSON.
        TextFault: A repeated key, NaN, or more nesting or digits than Python's parser takes.
    """
    try:
        return json.loads(
            text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant, parse_float=integer_if_exponent
        )
    except (json.JSONDecodeError, TextFault):
        raise
    except (RecursionError, ValueError) as error:
        raise beyond_parser(error) from None


def beyond_parser(error: Exception) -> TextFault:
    """The fault of a text with more nesting or digits than Python parses."""
    return TextFault(str(error), "a config stays within the limits of Python's parsers", "simplify it")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a parser's pairs; raises `TextFault` where a key is repeated."""
    result: dict[str, Any] = {}
    for key, item in pairs:
        if key in result:
            raise repeated_key(key)
        result[key] = item
    return result


def repeated_key(key: str) -> TextFault:
    """The fault of a key that occurs twice in one object."""
    return TextFault(f"{key} occurs twice in one object", "a key is set once", f"remove one {key}")


def _refuse_constant(text: str) -> float:
    raise TextFault(f"{text} is not a number", "JSON has finite numbers only", f"replace {text}")


def integer_if_exponent(text: str) -> int | float:
    """The number that a text with point or exponent spells."""
    number = float(text)
    is_count = "e" in text.lower() and number.is_integer() and abs(number) < 2**63
    return int(number) if is_count else number
