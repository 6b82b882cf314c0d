"""Reading the config files of other tools as those tools do: DeepSpeed's Hjson, accelerate's YAML. Pure.

The text decides how a file is parsed, not its name: text in braces is JSON or Hjson, other text is YAML.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hjson
import yaml

from ds_trainer.config.strict_json import (
    TextFault,
    beyond_parser,
    integer_if_exponent,
    parse_json,
    read_text,
    repeated_key,
    unique_keys,
)
from ds_trainer.errors import ConfigError

_SPACE_AND_COMMENTS = re.compile(r"\s+|//.*|#.*|/\*[\s\S]*?\*/")
"""Those of Hjson and YAML."""


def load_foreign_config(path: Path) -> dict[str, Any]:
    """Reads JSON, JSON with comments and trailing commas as DeepSpeed takes it, and YAML.

    Raises:
        ConfigError: No such file, neither of these, or no mapping; with line and column where they are known.
    """
    text = read_text(path)
    if not text.strip():
        raise _no_keys(path, "is empty")
    try:
        tree = _parse(text, path)
    except TextFault as fault:
        raise fault.error(path) from None
    if not isinstance(tree, dict):
        raise _no_keys(path, f"holds no keys, but {_shown(tree)}")
    if not tree:
        raise _no_keys(path, "holds no keys")
    return tree


def _no_keys(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{path} {found}",
        "a config is a mapping of keys to values",
        "give the path of a config",
    )


def _shown(tree: Any) -> str:
    return "a list" if isinstance(tree, list) else "null" if tree is None else repr(str(tree)[:40])


def _parse(text: str, path: Path) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if not _SPACE_AND_COMMENTS.sub("", text).startswith(("{", "[")):
            return _parse_yaml(text, path)
        return _parse_hjson(text, path, error)


def _parse_hjson(text: str, path: Path, strict: json.JSONDecodeError) -> Any:
    """Parses JSON with comments; `strict` is what was wrong with it as JSON."""
    try:
        return hjson.loads(text, object_pairs_hook=unique_keys, parse_float=integer_if_exponent)
    except hjson.HjsonDecodeError as error:
        place = f", line {error.lineno}, column {error.colno}: {error.msg}"
        if "(eof)" in error.msg:  # it takes the rest of a line for a string, and so notices late
            is_comment = text[strict.pos : strict.pos + 1] in ("/", "#")
            place = f", line {strict.lineno}, column {strict.colno}: {strict.msg}"
            place = " ends within an object" if is_comment else place
        raise ConfigError(
            f"{path}{place}",
            "a DeepSpeed config is JSON, with comments at most",
            "correct the comma, quote or bracket there",
        ) from None
    except TextFault:
        raise
    except (RecursionError, ValueError) as error:
        raise beyond_parser(error) from None


_TEXT, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "merge"))


class _Loader(yaml.SafeLoader):
    """YAML of plain values, as JSON has them: keys are strings and occur once, no tags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if tag := getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem=f"the tag {tag}", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key that is not a string", problem_mark=key.start_mark)
            if key.value in names:
                raise repeated_key(key.value)
            names.add(key.value)
            if key.tag != _MERGE:
                key.tag = _TEXT
        return node


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        loaded = yaml.load(text, _Loader)
        json.dumps(loaded, default=str)  # An alias inside of its own anchor makes a value that contains itself.
        return loaded
    except RecursionError as error:
        raise beyond_parser(error) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _bad_yaml(f"{path}{place}: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise _bad_yaml(f"{path}: {error.reason} at position {error.position}") from None
    except TextFault:
        raise
    except ValueError as error:  # text that looks like a date or an integer and is neither; a value inside itself
        raise _bad_yaml(f"{path}: {error}") from None


def _bad_yaml(found: str) -> ConfigError:
    return ConfigError(found, "text that is not in braces is read as YAML of plain values", "correct it there")
