"""Reading a run: JSON, `--set`, a DeepSpeed JSON beside it, and every fault of them in one report. Pure.

Order of places: `--set` wins over the file, the file over the default. Two places of one rank that differ (a key set
twice on the command line, a DeepSpeed JSON against `native.deepspeed`) are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ds_trainer.config.detect_format import NAMES, kind_of, kind_of_file
from ds_trainer.config.keys import assign, flatten, leaf_fields, named_values, nearest, sections, suggestion
from ds_trainer.config.rules import check_config
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.strict_json import TextFault, parse_json, read_text
from ds_trainer.errors import ConfigError, ConfigErrors

Source = str | Path | Mapping[str, Any] | RunConfig

_TYPE_OF_ERROR: dict[str, tuple[type, ...]] = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}


@dataclass(frozen=True)
class Loaded:
    """What could be read, and what was wrong with it.

    Args:
        config: The config, without the keys that are wrong.
        origins: Dotted leaf key -> the place that set it, or `default`.
        errors: Every fault found.
    """

    config: RunConfig
    origins: dict[str, str]
    errors: list[ConfigError]


def load_config(
    source: Source,
    overrides: Sequence[str] = (),
    deepspeed_config: str | Path | None = None,
    made_from: Mapping[str, str] | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """Reads a run's JSON.

    Args:
        source: File, its content as a mapping, or a config made in Python, whose unset keys are left open.
        overrides: `a.b=c` each; the value is JSON, or else a string; `null` takes the key out of the file.
        deepspeed_config: DeepSpeed JSON whose content goes to `native.deepspeed`.
        made_from: Dotted leaf key -> the place that set it, of a mapping that was made from something else.

    Returns:
        The config, and dotted leaf key -> the place that set it, or `default`.

    Raises:
        ConfigErrors: Every fault, together.
    """
    loaded = read_config(source, overrides, deepspeed_config, made_from)
    if loaded.errors:
        raise ConfigErrors(loaded.errors)
    return loaded.config, loaded.origins


def read_config(
    source: Source,
    overrides: Sequence[str] = (),
    deepspeed_config: str | Path | None = None,
    made_from: Mapping[str, str] | None = None,
) -> Loaded:
    """As `load_config`, but hands back the faults beside what could be read.

    Raises:
        ConfigError: The file is missing or no JSON, an override cannot be applied, or two DeepSpeed blocks differ.
    """
    name, raw = _read(source)
    places = dict.fromkeys(_flatten(raw), name) | dict(made_from or {})
    if deepspeed_config is not None:
        own = set(flatten(raw.get("native", {})))
        raw = merge_native(raw, deepspeed_config, name)
        added = set(flatten(raw["native"])) - own
        places |= dict.fromkeys((f"native.{key}" for key in added), str(deepspeed_config))
    _apply_overrides(raw, overrides, places)
    config, errors, bad_keys = _validate(raw, places)
    origins = dict.fromkeys(leaf_fields(), "default") | places
    # A wrong key's default stands in for it here; what a rule finds about that default is not the user's fault.
    errors += [e for e in check_config(config, origins) if not any(key in str(e) for key in bad_keys)]
    return Loaded(config, origins, errors)


def _read(source: Source) -> tuple[str, dict[str, Any]]:
    if isinstance(source, RunConfig):
        return "RunConfig", source.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(source, Mapping):
        return "config", deepcopy(dict(source))
    return str(source), _load_run(Path(source))


def _load_run(path: Path) -> dict[str, Any]:
    """As `load_json`, but says so where the file is another tool's."""
    try:
        raw = load_json(path)
    except ConfigError:
        if kind := kind_of_file(path):
            raise _not_ours(path, kind) from None
        raise
    kind = kind_of(raw)
    # DeepSpeed has an optimizer section too.
    if kind and not raw.keys() & set(sections()) - {"optimizer"}:
        raise _not_ours(path, kind)
    return raw


def _not_ours(path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"{path} looks like {NAMES[kind]}",
        "a run's JSON has sections such as model, data and optimizer",
        f"ds-trainer config import {path} makes a run's JSON of it",
    )


def load_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object strictly: no repeated key, no NaN.

    A number such as `5e8` is an integer, as in JSON Schema.

    Raises:
        ConfigError: No such file, or not a JSON object; with line and column.
    """
    text = read_text(Path(path))
    if not text.strip():
        raise ConfigError(f"{path} is empty", "a config is a JSON object", f"write {{...}} into {path}")
    try:
        raw = parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}",
            "a config is strict JSON: double quotes, no comments, no trailing comma",
            f"mend line {error.lineno} of {path}",
        ) from None
    except TextFault as fault:
        raise fault.error(path) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {_kind(raw)}", "a config is a JSON object", f"write {{...}} into {path}")
    return raw


def merge_native(raw: Mapping[str, Any], path: str | Path, name: str = "config") -> dict[str, Any]:
    """Puts the content of a DeepSpeed JSON under `native.deepspeed`.

    Args:
        raw: The run, not yet validated.
        path: The DeepSpeed JSON.
        name: What to call the run in an error.

    Raises:
        ConfigErrors: Both hold a key with different values.
    """
    merged = deepcopy(dict(raw))
    block = merged.setdefault("native", {}).setdefault("deepspeed", {})
    here, there = flatten(block), flatten(load_json(path))
    errors = [
        ConfigError(
            f"{key} is {_json(there[key])} in {path} and {_json(here[key])} in native.deepspeed of {name}",
            "a DeepSpeed key is said once, or the same twice",
            f"remove {key} from {path} or native.deepspeed.{key} from {name}",
        )
        for key in there
        if key in here and here[key] != there[key]
    ]
    if errors:
        raise ConfigErrors(errors)
    for key, item in there.items():
        assign(block, key, item)
    return merged


def _apply_overrides(raw: dict[str, Any], overrides: Sequence[str], places: dict[str, str]) -> None:
    """Applies `--set` to the raw config in place, and writes to `places` what each replaced."""
    given: dict[str, Any] = {}
    for text in overrides:
        for key, item in _parse_override(text).items():
            if key in given and given[key] != item:
                raise ConfigError(
                    f"--set {key}={_json(given[key])} and --set {key}={_json(item)}",
                    "one key is set once on the command line",
                    f"drop one --set {key}",
                )
            given[key] = item
    for key, item in given.items():
        said = f" ({places[key]} says {_json(_look_up(raw, key))})" if key in places else ""
        for old in [place for place in places if place == key or place.startswith(f"{key}.")]:
            del places[old]
        if item is None:
            _remove(raw, key.split("."))
        else:
            assign(raw, key, item)
            places[key] = f"--set{said}"


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}", "an override reads key=value", "write for example --set optimizer.lr=1e-5")
    if whole := next((name for name in named_values() if key.startswith(f"{name}.")), None):
        entry = _json({key.removeprefix(f"{whole}."): "..."})
        raise ConfigError(
            f"--set {key}",
            f"the names in {whole} have dots of their own, so that it is one value, which replaces the file's",
            f"write --set '{whole}={entry}' with all entries",
        )
    try:
        item = parse_json(value)
    except json.JSONDecodeError:
        item = value
    except TextFault as fault:
        raise fault.error(f"--set {text}") from None
    return _flatten({key: item})


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> values, what is a mapping of names being one value."""
    return flatten(tree, stop=named_values())


def _look_up(raw: Mapping[str, Any], key: str) -> Any:
    node: Any = raw
    for part in key.split("."):
        node = node[part]
    return node


def _remove(raw: dict[str, Any], path: Sequence[str | int]) -> None:
    node: Any = raw
    for part in path[:-1]:
        node = node.get(part, {})
    node.pop(path[-1], None)


def _validate(raw: dict[str, Any], places: Mapping[str, str]) -> tuple[RunConfig, list[ConfigError], set[str]]:
    """The config less its wrong keys, the faults, and the keys they concern."""
    try:
        text = json.dumps(raw)
    except TypeError as error:
        raise ConfigError(f"config: {error}", "a config holds JSON values only", "pass plain values") from None
    try:
        return RunConfig.model_validate_json(text), [], set()
    except ValidationError as error:
        details = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":  # such as half of a surrogate pair, which Python's reader lets through
        raise ConfigError(details[0]["msg"], "a config is valid JSON, and its text valid Unicode", "mend that text")
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
        _remove(pruned, path)
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
        f"{key} is {_json(item)} ({_kind(item)}){_in(key, places)}",
        f"{key} must be {' or '.join(rules)}",
        _right_spelling(key, first) or _described(key, item),
    )


def _wrong_entry(key: str, fault: Mapping[str, Any], places: Mapping[str, str]) -> ConfigError:
    """The fault of one name, or of its value, in a mapping of names."""
    item, name = fault["input"], fault["loc"][key.count(".") + 1]
    entry = f"{key}[{_json(name)}]"
    found = "has no name" if fault["loc"][-1] == "[key]" else f"is {_json(item)} ({_kind(item)})"
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
        return f"leave {key} out for its default, {_json(field.default)}"
    usual = "" if field.default is None else f" (default {_json(field.default)})"
    return f"set {key} as described{usual}: {field.description}"


def _right_spelling(key: str, fault: Mapping[str, Any]) -> str | None:
    item, wanted = fault["input"], _TYPE_OF_ERROR.get(fault["type"], ())
    if fault["type"] == "string_type" and isinstance(item, bool | int | float):
        return f'write "{_json(item)}", with quotes'
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


def _json(item: Any) -> str:
    return json.dumps(item)


def _kind(item: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(item), "null")
