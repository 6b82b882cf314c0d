"""Reading the config files of other tools as those tools do: DeepSpeed's Hjson, accelerate's YAML. Pure.

What a file is written in shows in its text, whatever its name: JSON and Hjson are in braces, other text is YAML.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hjson
import yaml

from ds_trainer.config.strict_json import (
    TextFault,
    check_nesting,
    integer_if_exponent,
    parse_json,
    read_text,
    short_integer,
    too_deep,
    twice,
    unique_keys,
)
from ds_trainer.errors import ConfigError

_SAYS_NOTHING = re.compile(r"\s+|//.*|#.*|/\*[\s\S]*?\*/")
"""Space and comments of Hjson and YAML."""


def load_native(path: Path) -> dict[str, Any]:
    """Reads JSON, JSON with comments and trailing commas as DeepSpeed takes it, and YAML.

    Raises:
        ConfigError: No such file, neither of these, or no mapping; with line and column where there is one.
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
        f"{path} {found}", "a config is a mapping of keys to values, by which it is known", "give the path of a config"
    )


def _shown(tree: Any) -> str:
    return "a list" if isinstance(tree, list) else "null" if tree is None else repr(str(tree)[:40])


def _parse(text: str, path: Path) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if not _SAYS_NOTHING.sub("", text).startswith(("{", "[")):
            return _parse_yaml(text, path)
        return _parse_hjson(text, path, error)


def _parse_hjson(text: str, path: Path, strict: json.JSONDecodeError) -> Any:
    """Parses JSON with comments; `strict` is what was wrong with it as JSON."""
    try:
        tree = hjson.loads(
            text, object_pairs_hook=unique_keys, parse_float=integer_if_exponent, parse_int=short_integer
        )
    except RecursionError:
        raise too_deep() from None
    except hjson.HjsonDecodeError as error:
        place = f", line {error.lineno}, column {error.colno}: {error.msg}"
        if "(eof)" in error.msg:  # it takes the rest of a line for a string, and so notices late
            is_comment = text[strict.pos : strict.pos + 1] in ("/", "#")
            place = f", line {strict.lineno}, column {strict.colno}: {strict.msg}"
            place = " ends within an object" if is_comment else place
        raise ConfigError(
            f"{path}{place}",
            "a DeepSpeed config is JSON, with comments at most",
            "mend the comma, quote or bracket there",
        ) from None
    check_nesting(tree)
    return tree


_TEXT, _FLOAT, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "float", "merge"))


class _Loader(yaml.SafeLoader):
    """YAML of plain values, as JSON has them: keys are texts and stand once, no tags, no infinity."""

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
                raise yaml.MarkedYAMLError(problem="a key that is no text", problem_mark=key.start_mark)
            if key.value in names:
                raise twice(key.value)
            names.add(key.value)
            if key.tag != _MERGE:
                key.tag = _TEXT
        return node

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        number = super().construct_yaml_float(node)
        if not math.isfinite(number):
            raise TextFault(f"{node.value} is no finite number", "a config has finite numbers", f"replace {node.value}")
        return number


_Loader.add_constructor(_FLOAT, _Loader.construct_yaml_float)


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        # Before anything is built: a merge of aliases of aliases would grow while it is.
        check_nesting(node, _yaml_children)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise too_deep() from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _bad_yaml(f"{path}{place}: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise _bad_yaml(f"{path}: {error.reason} at position {error.position}") from None
    except TextFault:
        raise
    except ValueError as error:  # what looks like a date or an integer, and is none
        raise _bad_yaml(f"{path}: {error}") from None


def _yaml_children(node: yaml.Node | None) -> Iterable[yaml.Node]:
    match node:
        case yaml.MappingNode():
            return (part for pair in node.value for part in pair)
        case yaml.SequenceNode():
            return node.value
        case _:
            return ()


def _bad_yaml(found: str) -> ConfigError:
    return ConfigError(found, "text that is not in braces is read as YAML of plain values", "mend it there")
