"""Values of DeepSpeed's own keys against the types that DeepSpeed has for them. Pure.

A type is a JSON Schema of few words: `type` with the kinds that are admitted, `enum`, `items` with the kind of a list's
items, and bounds. Text is not read as a number: DeepSpeed reads some keys without converting them, and fails in a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ds_trainer.config.validation import json_type
from ds_trainer.errors import ConfigError

Kind = Mapping[str, Any]

_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("at least", lambda item, bound: item >= bound),
    "exclusiveMinimum": ("above", lambda item, bound: item > bound),
    "maximum": ("at most", lambda item, bound: item <= bound),
    "exclusiveMaximum": ("below", lambda item, bound: item < bound),
}
_PYTHON: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def admits(kind: Kind, item: Any) -> bool:
    """Whether DeepSpeed takes this value for a key of this type."""
    if item is None:
        return "null" in kind["type"]
    if "enum" in kind:
        return any(type(item) is type(choice) and item == choice for choice in kind["enum"])
    if not any(_is_of(name, item) for name in kind["type"]):
        return False
    if isinstance(item, list) and "items" in kind:
        return all(_is_of(kind["items"], entry) for entry in item)
    is_number = isinstance(item, int | float) and not isinstance(item, bool)
    return not is_number or all(_BOUNDS[name][1](item, kind[name]) for name in _BOUNDS if name in kind)


def wrong_value(key: str, item: Any, kind: Kind) -> ConfigError:
    """The error of a value that DeepSpeed does not take.

    Args:
        key: The native key.
        item: Its value.
        kind: Its type.
    """
    return ConfigError(
        f"native.deepspeed.{key} is {json.dumps(item)} ({json_type(item)})",
        f"DeepSpeed's {key} is {described(kind)}",
        _meant(item, kind) or f"set it to {described(kind)}, or remove it for DeepSpeed's own value",
    )


def described(kind: Kind) -> str:
    """A type in words, such as `an integer, at least 0`."""
    if "enum" in kind:
        return f"one of {', '.join(json.dumps(choice) for choice in kind['enum'])}"
    names = [name for name in kind["type"] if name != "null"]
    text = " or ".join(f"{'an' if name[0] in 'aeio' else 'a'} {name}" for name in names)
    text += f" of {kind['items']}s" if "items" in kind else ""
    return ", ".join([text, *(f"{word} {kind[name]}" for name, (word, _) in _BOUNDS.items() if name in kind)])


def _is_of(name: str, item: Any) -> bool:
    if name in ("integer", "number"):
        is_number = isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
        return is_number and (name == "number" or item == int(item))
    return type(item) in _PYTHON[name]


def _meant(item: Any, kind: Kind) -> str | None:
    """The change where the value only has the wrong spelling."""
    if not isinstance(item, str):
        return f"write {json.dumps(str(item))}, with quotes" if admits(kind, str(item)) else None
    try:
        meant = json.loads(item.lower())
    except json.JSONDecodeError:
        return None
    return f"write {json.dumps(meant)}, without quotes" if admits(kind, meant) else None
