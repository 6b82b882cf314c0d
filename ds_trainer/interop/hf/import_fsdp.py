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

_OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
"""What `fsdp` may hold as text: FSDP1's strategies, and two switches."""

_HYBRID = "one replica of the model on each machine: their number is parallelism_config.dp_replicate_size, or 1"


def carry_fsdp_fields(given: HFImport) -> None:
    """Adds the lines of both fields; a line for a default has no value.

    Raises:
        ConfigError: An option of `fsdp` that this version of FSDP lacks.
    """
    written = given.section("fsdp_config") or {}
    in_file = {name.removeprefix("fsdp_"): (name, item) for name, item in written.items()}
    section = {name: item for name, (_, item) in in_file.items()}
    section.setdefault("version", 2)
    by_options = _from_options(given["fsdp"], section["version"])
    section = by_options | section
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
            given.found.lines[-1] = _as_written(given.found.lines[-1], name, in_file, by_options)
    keep_fsdp_defaults(given.found, native)
    hybrid = str(section.get("reshard_after_forward", "")).lower().startswith("hybrid")
    given.found.lines[before:] = [
        replace(line, outcome="changed", note=_HYBRID) if hybrid and "parallel.dp_replicate" in line.ours else line
        for line in given.found.lines[before:]
    ]


def _as_written(line: ImportLine, name: str, in_file: Mapping[str, Any], by_options: Mapping[str, Any]) -> ImportLine:
    """The line under the file's own key; without a value where the file lacks it."""
    if name in in_file:
        return replace(line, key=f"fsdp_config.{in_file[name][0]}")
    whence = f"by fsdp: {line.value}" if name in by_options else f"transformers' default: {line.value}"
    return replace(line, value=None, note="; ".join(filter(None, (whence, line.note))))


def _from_options(fsdp: bool | str | list[str], version: int | str) -> dict[str, Any]:
    """The options of `fsdp` as keys of `fsdp_config`.

    Raises:
        ConfigError: This version of FSDP has no such option.
    """
    options = [] if fsdp is True else fsdp.split() if isinstance(fsdp, str) else fsdp
    section: dict[str, Any] = {}
    for option in options if isinstance(options, list) else [options]:
        if option not in _OPTIONS:
            raise ConfigError(
                f"fsdp is {fsdp!r}, with {option!r}",
                f"it is true or false, or has the options {', '.join(_OPTIONS)}",
                "set fsdp to true, and the rest in fsdp_config",
            )
        if option == "offload":
            section["cpu_offload"] = True
        elif str(version) == "1" and option != "auto_wrap":
            section.setdefault("reshard_after_forward", option)
        elif option in ("full_shard", "shard_grad_op"):
            section.setdefault("reshard_after_forward", option == "full_shard")
        elif option != "auto_wrap":
            raise ConfigError(
                f"fsdp is {fsdp!r}, with fsdp_config.version {version}",
                f"{option} is an option of FSDP1 alone",
                "set fsdp to true and fsdp_config.reshard_after_forward, or fsdp_config.version to 1",
            )
    return section


def _in_accelerate(name: str) -> str:
    return {"cpu_offload": "offload_params"}.get(name, name)
