"""The reference of every config key as Markdown. Pure.

`python -m ds_trainer.config.reference_page > docs/configuration.md` writes it.

The schema and the table of `key_support` are its only sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_trainer.config.key_support import key_support
from ds_trainer.config.key_support_table import ENGINES, cell
from ds_trainer.config.keys import default, leaf_fields
from ds_trainer.config.schema import RunConfig

_HEAD = """# Configuration

A run is one JSON object of sections. An unknown key is an error. A key that is left out has the default below;
`null` as a default means that the value is derived, and `ds-trainer config show` prints what it became and why.
`--set section.key=value` overrides a key on the command line; the value `null` takes a key or section out of the file.
Relative paths are relative to the working directory.

The lines below a table say what each engine does with its keys: **mapped** keys are passed to the engine; **implied**
keys are acted on by ds_trainer itself, alike on every engine; **refused** keys are an error when they are set; **no
effect** keys give a warning. A table without such lines has keys that are implied on every engine.

This page is printed by `python -m ds_trainer.config.reference_page`.
"""


def document() -> str:
    """The whole page."""
    by_section: dict[str, list[str]] = {}
    for key in leaf_fields():
        by_section.setdefault(key.rpartition(".")[0], []).append(key)
    return "\n".join([_HEAD, *(_section(name, keys) for name, keys in by_section.items())])


def _section(name: str, keys: list[str]) -> str:
    schema = _schema_of(name)
    lines = [f"## {name or 'Top level'}", ""]
    lines += [schema["description"].partition("\n")[0], ""] if name else []
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        field = schema["properties"][key.rpartition(".")[2]]
        cells = (f"`{key}`", _values(field), f"`{json.dumps(default(key))}`", field["description"])
        lines.append(f"| {' | '.join(cells)} |")
    support = {engine: _engine_support(keys, engine) for engine in ENGINES}
    if any(text != "implied" for text in support.values()):
        lines += ["", *(f"- {engine}: {text}" for engine, text in support.items())]
    return "\n".join([*lines, ""])


def _schema_of(section: str) -> Mapping[str, Any]:
    """The JSON Schema of a dotted section."""
    schema = RunConfig.model_json_schema(by_alias=True)
    node: Mapping[str, Any] = schema
    for part in filter(None, section.split(".")):
        node = schema["$defs"][node["properties"][part]["$ref"].rpartition("/")[2]]
    return node


def _values(field: Mapping[str, Any]) -> str:
    """The values that a field admits; null is left out."""
    if "anyOf" in field:
        return " or ".join(_values(part) for part in field["anyOf"] if part.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{json.dumps(item)}`" for item in field["enum"])
    if field["type"] == "array":
        items = field.get("prefixItems")
        return f"[{', '.join(_values(item) for item in items)}]" if items else f"list of {_values(field['items'])}s"
    return f"{field['type']} {' and '.join(_bounds(field))}".rstrip()


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = ((sign, field[name]) for name, sign in signs.items() if name in field)
    return (f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound:g}" for sign, bound in bounds)


def _engine_support(keys: list[str], engine: str) -> str:
    """What an engine does with the keys of a section, keys with the same answer together."""
    by_text: dict[str, list[str]] = {}
    for key in keys:
        by_text.setdefault(_support_text(key, engine), []).append(f"`{key.rpartition('.')[2]}`")
    if len(by_text) == 1:
        return next(iter(by_text))
    return "; ".join(f"{', '.join(names)} {text}" for text, names in by_text.items())


def _support_text(key: str, engine: str) -> str:
    if engine == "accelerate":
        return cell(key, engine)
    entry = key_support(key, engine)
    return "implied" if entry.status == "implied" else f"{entry.status.replace('_', ' ')} ({entry.note})"


if __name__ == "__main__":
    print(document(), end="")
