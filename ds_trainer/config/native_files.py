"""Reading the config files of other tools as those tools do: DeepSpeed's Hjson, accelerate's YAML. Pure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hjson
import yaml

from ds_trainer.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")


def load_native(path: Path) -> dict[str, Any]:
    """Reads YAML by its suffix, and anything else as DeepSpeed does: JSON with comments and trailing commas.

    Raises:
        ConfigError: No such file, not of its format, or no mapping; with line and column.
    """
    is_yaml = path.suffix.lower() in YAML_SUFFIXES
    kind, parse = ("YAML", _parse_yaml) if is_yaml else ("JSON", _parse_hjson)
    tree = parse(_text(path), path)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds no keys: {str(tree)[:40]!r}",
            f"a config in {kind} is a mapping of keys to values",
            "give the path of a config",
        )
    return tree


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", "an import reads a config file", "give the path of a readable one"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}",
            "a config is text in UTF-8",
            f"save {path} as UTF-8",
        ) from None


def _parse_hjson(text: str, path: Path) -> Any:
    try:
        return hjson.loads(text, object_pairs_hook=_unique(path))
    except hjson.HjsonDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}",
            "a DeepSpeed config is JSON, with comments at most",
            f"mend line {error.lineno} of {path}",
        ) from None


def _unique(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(
                f"{twice} stands twice in one object of {path}", "a key is set once", f"remove one {twice}"
            )
        return dict(pairs)

    return build


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{path}{place}: {error.problem}", "an accelerate config is YAML of plain values", f"mend {path}"
        ) from None
