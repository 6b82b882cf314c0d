"""`fsdp` and `fsdp_config` of `TrainingArguments`, read as accelerate's section of that name. Pure.

Source: transformers 5.24, `TrainingArguments._process_fsdp_args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_trainer.errors import ConfigError
from ds_trainer.interop.accelerate.import_fsdp import carry_fsdp, fsdp_engine, keep_fsdp_defaults
from ds_trainer.interop.hf.arguments import HFImport
from ds_trainer.interop.import_result import ImportLine

_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
"""What `fsdp` may hold as text: FSDP1's strategies, and two switches."""

_HYBRID = "one copy of the model on each machine: their number is parallelism_config.dp_replicate_size, or 1"


def carry_fsdp_fields(given: HFImport) -> None:
    """Adds the lines of both fields; what the file does not say has no value.

    Raises:
        ConfigError: A word of `fsdp` that there is not, in this version of FSDP.
    """
    written = given.section("fsdp_config") or {}
    in_file = {name.removeprefix("fsdp_"): (name, item) for name, item in written.items()}
    section = {name: item for name, (_, item) in in_file.items()}
    section.setdefault("version", 2)
    by_words = _of_words(given["fsdp"], section["version"])
    section = by_words | section
    section.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    # Written there by transformers itself, as are the switches of XLA.
    idle = {name for name, item in section.items() if not item and (name == "min_num_params" or name[:3] == "xla")}
    native = {"fsdp_config": {_in_accelerate(name): item for name, item in section.items() if name not in idle}}
    given.carry("fsdp", {"parallel.engine": fsdp_engine(native)}, "its keys follow")
    before = len(given.found.lines)
    for name, item in section.items():
        if name in idle:
            given.found.carry(f"fsdp_config.{in_file[name][0]}", item, {}, "off here too")
        else:
            carry_fsdp(given.found, native, f"fsdp_config.{_in_accelerate(name)}", item)
            given.found.lines[-1] = _as_written(given.found.lines[-1], name, in_file, by_words)
    keep_fsdp_defaults(given.found, native)
    hybrid = str(section.get("reshard_after_forward", "")).lower().startswith("hybrid")
    given.found.lines[before:] = [
        replace(line, outcome="changed", note=_HYBRID) if hybrid and "parallel.dp_replicate" in line.ours else line
        for line in given.found.lines[before:]
    ]


def _as_written(line: ImportLine, name: str, in_file: Mapping[str, Any], by_words: Mapping[str, Any]) -> ImportLine:
    """The line under the key of the file; without a value where the file does not have it."""
    if name in in_file:
        return replace(line, key=f"fsdp_config.{in_file[name][0]}")
    whence = f"by fsdp: {line.value}" if name in by_words else f"transformers' default: {line.value}"
    return replace(line, value=None, note="; ".join(filter(None, (whence, line.note))))


def _of_words(said: bool | str | list[str], version: int | str) -> dict[str, Any]:
    """What the words of `fsdp` mean in `fsdp_config`.

    Raises:
        ConfigError: There is no such word, in this version of FSDP.
    """
    words = [] if said is True else said.split() if isinstance(said, str) else said
    section: dict[str, Any] = {}
    for word in words if isinstance(words, list) else [words]:
        if word not in _WORDS:
            raise ConfigError(
                f"fsdp is {said!r}, with {word!r}",
                f"it is true or false, or of the words {', '.join(_WORDS)}",
                "set fsdp to true, and the rest in fsdp_config",
            )
        if word == "offload":
            section["cpu_offload"] = True
        elif str(version) == "1" and word != "auto_wrap":
            section.setdefault("reshard_after_forward", word)
        elif word in ("full_shard", "shard_grad_op"):
            section.setdefault("reshard_after_forward", word == "full_shard")
        elif word != "auto_wrap":
            raise ConfigError(
                f"fsdp is {said!r}, with fsdp_config.version {version}",
                f"{word} is a word of FSDP1 alone",
                "set fsdp to true and fsdp_config.reshard_after_forward, or fsdp_config.version to 1",
            )
    return section


def _in_accelerate(name: str) -> str:
    return {"cpu_offload": "offload_params"}.get(name, name)
