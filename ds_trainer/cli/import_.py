"""`ds-trainer config import`: a run's JSON from the config of DeepSpeed, accelerate or Hugging Face; without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.config.accelerate.from_accelerate import from_accelerate
from ds_trainer.config.deepspeed.from_deepspeed import from_deepspeed
from ds_trainer.config.hf.from_hf import from_hf
from ds_trainer.config.import_report import report
from ds_trainer.config.imported import Imported
from ds_trainer.config.io import read_config
from ds_trainer.config.keys import value
from ds_trainer.config.native_files import load_native
from ds_trainer.errors import ConfigError

_MARKS = {
    "accelerate": ("distributed_type", "compute_environment"),
    "hf": ("output_dir", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"),
    "deepspeed": ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"),
}
"""Kind of file -> keys that show it. TrainingArguments write train_batch_size too, and so come before DeepSpeed."""

KINDS = tuple(_MARKS)


def import_file(args: argparse.Namespace) -> int:
    """Prints the report to stderr, and the run's JSON to stdout or to `--out`.

    Returns:
        2 where the outcome breaks a rule, which is then told beneath the report, and nothing is written; else 0.

    Raises:
        ConfigError: The file cannot be read or is of no known kind, or `--out` exists or cannot be written.
    """
    path, out = Path(args.config), Path(args.out) if args.out else None
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists", "an import overwrites nothing", f"remove {out} or name another file")
    native = load_native(path)
    found = _imported(native, args.kind or _kind(native, path), path)
    print(report(found), file=sys.stderr)
    loaded = read_config(found.tree)
    if loaded.errors:
        print("", *loaded.errors, sep="\n\n", file=sys.stderr)
        print("\nNothing was written: change these keys in the file that is imported.", file=sys.stderr)
        return 2
    text = json.dumps(loaded.config.model_dump(mode="json", by_alias=True, exclude_unset=True), indent=2)
    if open_keys := [key for key in ("model.path", "data.train") if value(loaded.config, key) is None]:
        print(f"left to you: {', '.join(open_keys)}", file=sys.stderr)
    if out is None:
        print(text)
    else:
        _write(out, text)
    return 0


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{out}: {error.strerror}", "--out names a new file in a folder that exists", "give another path"
        ) from None


def _imported(native: Mapping[str, Any], kind: str, path: Path) -> Imported:
    match kind:
        case "deepspeed":
            return from_deepspeed(native)
        case "accelerate":
            return from_accelerate(native, path.parent)
        case _:
            return from_hf(native)


def _kind(native: Mapping[str, Any], path: Path) -> str:
    for kind, marks in _MARKS.items():
        if any(mark in native for mark in marks):
            return kind
    raise ConfigError(
        f"{path} has the keys {', '.join(map(str, list(native)[:6]))}" if native else f"{path} is empty",
        "a DeepSpeed JSON has zero_optimization or a batch size, an accelerate YAML distributed_type, and "
        "TrainingArguments output_dir or learning_rate",
        f"say which it is: --from {', '.join(KINDS)}",
    )
