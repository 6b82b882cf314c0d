"""Reading a run: its JSON, `--set`, a DeepSpeed JSON beside it, and every fault of them in one report. Pure.

`--set` overrides the file, and the file overrides the default. Two values for one key at the same level (a key set
twice on the command line, a DeepSpeed JSON against `native.deepspeed`) are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.config.detect_format import FORMATS, detect_format, detect_format_of_file
from ds_trainer.config.keys import assign, flatten, leaf_fields, named_values, remove, sections
from ds_trainer.config.rules import check_config
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.strict_json import TextFault, parse_json, read_text
from ds_trainer.config.validation import json_type, validate
from ds_trainer.errors import ConfigError, ConfigErrors

Source = str | Path | Mapping[str, Any] | RunConfig


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
    config, errors, bad_keys = validate(raw, places)
    origins = dict.fromkeys(leaf_fields(), "default") | places
    # A wrong key has its default here: what a rule finds about that default is not the user's fault.
    errors += [e for e in check_config(config, origins) if not any(key in str(e) for key in bad_keys)]
    return Loaded(config, origins, errors)


def _read(source: Source) -> tuple[str, dict[str, Any]]:
    if isinstance(source, RunConfig):
        return "RunConfig", source.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(source, Mapping):
        return "config", deepcopy(dict(source))
    return str(source), _load_run(Path(source))


def _load_run(path: Path) -> dict[str, Any]:
    """As `load_json`; names the tool where the file is another tool's."""
    try:
        raw = load_json(path)
    except ConfigError:
        if found := detect_format_of_file(path):
            raise _foreign(path, found) from None
        raise
    found = detect_format(raw)
    # DeepSpeed has an optimizer section too.
    if found and not raw.keys() & set(sections()) - {"optimizer"}:
        raise _foreign(path, found)
    return raw


def _foreign(path: Path, file_format: str) -> ConfigError:
    return ConfigError(
        f"{path} looks like {FORMATS[file_format]}",
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
            f"correct line {error.lineno} of {path}",
        ) from None
    except TextFault as fault:
        raise fault.error(path) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {json_type(raw)}", "a config is a JSON object", f"write {{...}} into {path}")
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
            f"{key} is {json.dumps(there[key])} in {path} and {json.dumps(here[key])} in native.deepspeed of {name}",
            "a DeepSpeed key has one value",
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
                    f"--set {key}={json.dumps(given[key])} and --set {key}={json.dumps(item)}",
                    "one key is set once on the command line",
                    f"drop one --set {key}",
                )
            given[key] = item
    for key, item in given.items():
        said = f" ({places[key]} says {json.dumps(_look_up(raw, key))})" if key in places else ""
        for old in [place for place in places if place == key or place.startswith(f"{key}.")]:
            del places[old]
        if item is None:
            remove(raw, key.split("."))
        else:
            assign(raw, key, item)
            places[key] = f"--set{said}"


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}", "an override reads key=value", "write for example --set optimizer.lr=1e-5")
    if mapping := next((name for name in named_values() if key.startswith(f"{name}.")), None):
        entry = json.dumps({key.removeprefix(f"{mapping}."): "..."})
        raise ConfigError(
            f"--set {key}",
            f"the names in {mapping} may contain dots, so that {mapping} is one value, which replaces the file's",
            f"write --set '{mapping}={entry}' with all entries",
        )
    try:
        item = parse_json(value)
    except json.JSONDecodeError:
        item = value
    except TextFault as fault:
        raise fault.error(f"--set {text}") from None
    return _flatten({key: item})


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> values; a mapping of names is one value."""
    return flatten(tree, stop=named_values())


def _look_up(raw: Mapping[str, Any], key: str) -> Any:
    node: Any = raw
    for part in key.split("."):
        node = node[part]
    return node
