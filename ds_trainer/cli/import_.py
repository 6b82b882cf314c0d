"""`ds-trainer config import`: a run's JSON from the config of DeepSpeed, accelerate or Hugging Face; without torch."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.config.detect_format import FORMATS, detect_format
from ds_trainer.config.foreign_files import load_foreign_config
from ds_trainer.config.io import read_config
from ds_trainer.config.keys import value
from ds_trainer.errors import ConfigError
from ds_trainer.interop.accelerate.importer import from_accelerate
from ds_trainer.interop.deepspeed.importer import from_deepspeed
from ds_trainer.interop.hf.importer import from_hf
from ds_trainer.interop.import_report import report
from ds_trainer.interop.import_result import Imported


def import_file(args: argparse.Namespace) -> int:
    """Prints the report to stderr, and the run's JSON to stdout or to `--out`; `-` is stdin.

    Returns:
        2 where the result breaks a rule: the errors follow the report, and nothing is written; else 0.

    Raises:
        ConfigError: The file cannot be read or has another format, or `--out` exists or cannot be written.
    """
    path, out = Path("/dev/stdin" if args.config == "-" else args.config), Path(args.out) if args.out else None
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists", "an import overwrites nothing", f"remove {out} or name another file")
    found = _imported(load_foreign_config(path), args.kind, path)
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print(report(found, width), file=sys.stderr)
    led_from = {ours: f"{line.key} of {path.name}" for line in found.lines for ours in line.ours}
    loaded = read_config(found.tree, made_from=led_from)
    if loaded.errors:
        print("", *loaded.errors, _to_change(found, loaded.errors, path), sep="\n\n", file=sys.stderr)
        return 2
    text = json.dumps(loaded.config.model_dump(mode="json", by_alias=True, exclude_unset=True), indent=2)
    if open_keys := [key for key in ("model.path", "data.train") if value(loaded.config, key) is None]:
        print(f"left to you: {', '.join(open_keys)}", file=sys.stderr)
    if out is None:
        print(text)
    else:
        _write(out, text)
    return 0


def _to_change(found: Imported, errors: Sequence[ConfigError], path: Path) -> str:
    """The file's own keys that led to the keys in the errors."""
    named = set(re.findall(r"[\w.]+\w", "\n".join(map(str, errors))))
    led = {line.key: [key for key in line.ours if key in named] for line in found.lines}
    keys = [f"{key} (-> {', '.join(ours)})" for key, ours in led.items() if ours]
    what = f"in {path} change {', '.join(keys)}" if keys else f"change {path}"
    return f"Nothing was written: {what}."


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{out}: {error.strerror}", "--out names a new file in a folder that exists", "give another path"
        ) from None


def _imported(native: Mapping[str, Any], expected: str | None, path: Path) -> Imported:
    """The import of a file of the expected format, or else of the one that its keys show."""
    shown = detect_format(native, expected)
    kind = expected or shown
    if kind is None or shown not in (None, kind):
        raise _not_of_kind(native, kind, shown, path)
    match kind:
        case "deepspeed":
            found = from_deepspeed(native)
        case "accelerate":
            found = from_accelerate(native, path)
        case _:
            found = from_hf(native, folder=path.parent)
    if shown is None and all(line.outcome == "dropped" or line.value in (None, {}, []) for line in found.lines):
        raise _not_of_kind(native, kind, shown, path)
    return found


def _not_of_kind(native: Mapping[str, Any], kind: str | None, shown: str | None, path: Path) -> ConfigError:
    found = f"{path} has the keys {', '.join(map(str, list(native)[:6]))}"
    rule = (
        "a DeepSpeed JSON has zero_optimization or a batch size, an accelerate YAML distributed_type, and "
        "TrainingArguments output_dir or learning_rate"
    )
    if kind is None:
        return ConfigError(found, rule, f"say which it is: --from {', '.join(FORMATS)}")
    if shown is None:
        return ConfigError(f"{found}, of which {FORMATS[kind]} has none", rule, "give the path of one")
    return ConfigError(f"{found} and looks like {FORMATS[shown]}, not {FORMATS[kind]}", rule, f"use --from {shown}")
