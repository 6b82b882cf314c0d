"""A run's raw JSON as a `RunConfig`, with an error text for every key and value that the schema refuses. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from itertools import groupby
from typing import Any, get_args

from pydantic import ValidationError

from ds_trainer.config.keys import leaf_fields, named_values, nearest, remove, suggestion
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError

_TYPE_OF_ERROR: dict[str, tuple[type, ...]] = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}


def validate(raw: dict[str, Any], places: Mapping[str, str]) -> tuple[RunConfig, list[ConfigError], set[str]]:
    """Validates a run's JSON, and goes on without the keys that are wrong.

    Args:
        raw: The JSON.
        places: Dotted key -> the place that set it.

    Returns:
        The config without its wrong keys, the errors, and the keys that they are about.

    Raises:
        ConfigError: It holds values or text that JSON does not have.
    """
    try:
        text = json.dumps(raw)
    except TypeError as error:
        raise ConfigError(f"config: {error}", "a config holds JSON values only", "pass plain values") from None
    try:
        return RunConfig.model_validate_json(text), [], set()
    except ValidationError as error:
        details = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":  # such as half of a surrogate pair, which Python's reader lets through
        raise ConfigError(details[0]["msg"], "a config is valid JSON, and its text valid Unicode", "correct that text")
    pruned, errors, bad_keys = deepcopy(raw), [], set()
    for path, faults in groupby(details, key=lambda detail: _leaf_path(detail["loc"])):
        key = ".".join(map(str, path))
        first, *others = faults
        if key in named_values() and len(first["loc"]) > len(path):
            errors += [_wrong_entry(key, fault, places) for fault in (first, *others)]
            bad_keys.add(key)
        elif first["type"] == "extra_forbidden":
            errors.append(
                ConfigError(
                    f"{key} is no key{_in(key, places)}",
                    "an unknown key is refused, so that nothing is dropped in silence",
                    suggestion(key),
                )
            )
            bad_keys.add(nearest(key) or key)
        else:
            errors.append(_wrong_value(key, first, [first, *others], places))
            bad_keys.add(key)
        remove(pruned, path)
    return RunConfig.model_validate_json(json.dumps(pruned)), errors, bad_keys


def _leaf_path(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """`loc` up to its leaf key: pydantic goes on into the members of unions and the items of lists."""
    for end in range(1, len(loc)):
        if ".".join(map(str, loc[:end])) in leaf_fields():
            return loc[:end]
    return loc


def _wrong_value(
    key: str, first: Mapping[str, Any], faults: Iterable[Mapping[str, Any]], places: Mapping[str, str]
) -> ConfigError:
    item = first["input"]
    rules = dict.fromkeys(_rule(key, fault) for fault in faults)
    return ConfigError(
        f"{key} is {json.dumps(item)} ({json_type(item)}){_in(key, places)}",
        f"{key} must be {' or '.join(rules)}",
        _right_spelling(key, first) or _described(key, item),
    )


def _wrong_entry(key: str, fault: Mapping[str, Any], places: Mapping[str, str]) -> ConfigError:
    """The fault of one name, or of its value, in a mapping of names."""
    item, name = fault["input"], fault["loc"][key.count(".") + 1]
    entry = f"{key}[{json.dumps(name)}]"
    found = "has no name" if fault["loc"][-1] == "[key]" else f"is {json.dumps(item)} ({json_type(item)})"
    return ConfigError(
        f"{entry} {found}{_in(key, places)}",
        f"each name and each value in {key} is a string that is not empty",
        f"remove the entry or write it as described: {leaf_fields()[key].description}",
    )


def _rule(key: str, fault: Mapping[str, Any]) -> str:
    match fault["type"]:
        case "missing" | "too_long":  # of a list with a fixed length: nothing else is required or bounded above
            return f"a list of {len(get_args(leaf_fields()[key].annotation))} numbers"
        case "too_short":
            return "a list that is not empty"
        case "string_too_short":
            return "a string that is not empty"
        case "greater_than_equal":
            return f"at least {fault['ctx']['ge']}"
        case "less_than_equal":
            return f"at most {fault['ctx']['le']}"
    return str(fault["msg"]).removeprefix("Input should be ")


def _described(key: str, item: Any) -> str:
    field = leaf_fields().get(key)
    if field is None:
        return f"make {key} an object of its keys"
    if item is None:
        return f"leave {key} out for its default, {json.dumps(field.default)}"
    usual = "" if field.default is None else f" (default {json.dumps(field.default)})"
    return f"set {key} as described{usual}: {field.description}"


def _right_spelling(key: str, fault: Mapping[str, Any]) -> str | None:
    item, wanted = fault["input"], _TYPE_OF_ERROR.get(fault["type"], ())
    if fault["type"] == "string_type" and isinstance(item, bool | int | float):
        return f'write "{json.dumps(item)}", with quotes'
    if not isinstance(item, str):
        return None
    if item == "auto":
        return f"leave {key} out: what is left out is derived"
    if fault["type"] == "literal_error":
        choices = str(fault["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        close = get_close_matches(f"'{item.lower()}'", choices, n=1)
        return f"write {item}, without quotes" if item in choices else f"did you mean {close[0]}?" if close else None
    try:
        meant = json.loads(item.lower())
    except json.JSONDecodeError:
        return None
    return f"write {item.lower()}, without quotes" if wanted and type(meant) in wanted else None


def _in(key: str, places: Mapping[str, str]) -> str:
    place = next((place for name, place in places.items() if name == key or name.startswith(f"{key}.")), "")
    return f" in {place}" if place else ""


def json_type(item: Any) -> str:
    """JSON's name for the type of a value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(item), "null")
