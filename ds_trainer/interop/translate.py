"""A run as the files and the Python of another tool. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from ds_trainer.config.accelerate.arguments import to_accelerate_yaml
from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.arguments import native_notes, standalone_notes, to_deepspeed
from ds_trainer.config.key_support import key_support
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.interop.accelerate.notes import accelerate_notes
from ds_trainer.interop.accelerate.snippet import accelerate_snippet
from ds_trainer.interop.hf.exporter import hf_snippet, to_hf
from ds_trainer.interop.torch.snippet import ddp_snippet, fsdp2_snippet

TARGETS = ("deepspeed", "fsdp2", "ddp", "accelerate", "hf")
OPTIONS = {"standalone": ("deepspeed",), "python": ("accelerate", "hf")}
"""Option -> targets that have both forms."""


@dataclass(frozen=True)
class Translation:
    """A run as another tool's config.

    Args:
        text: The file.
        notes: Settings that the tool cannot express, one line each.
    """

    text: str
    notes: Sequence[str] = ()


def engine_overrides(config: RunConfig, origins: Mapping[str, str], to: str) -> list[str]:
    """The overrides that put a run on the engine of a target; for accelerate and hf it stays on what it runs on.

    Args:
        config: The run.
        origins: Dotted key -> the place that set it, or `default`.
        to: One of `TARGETS`.

    Raises:
        ConfigError: accelerate cannot express the run.
    """
    now = backend(config)
    for axis in ("tp", "pp"):
        key, size = f"parallel.{axis}", getattr(config.parallel, axis)
        if to == "accelerate" and size > 1:
            raise ConfigError(
                f"{key} is {size}, for accelerate", key_support(key, "accelerate+ddp").note, f"set {key} to 1"
            )
    if to == "accelerate" and config.parallel.engine != "accelerate":
        return ["parallel.engine=accelerate", f"accelerate.backend={now}"]
    if to in ("accelerate", "hf") or config.parallel.engine == to:
        return []
    overrides = [f"parallel.engine={to}"]
    if config.parallel.engine == "accelerate":
        overrides.append("accelerate=null")
    user_keys = [key for key, place in origins.items() if key.startswith("zero.") and place != "default"]
    if (now, to) == ("deepspeed", "fsdp2") and "zero.stage" not in user_keys:
        overrides.append(f"zero.stage={config.zero.stage}")  # The default stage is meant too.
    if (now, to) == ("deepspeed", "ddp") and user_keys == ["zero.stage"] and config.zero.stage == 0:
        overrides.append("zero=null")  # Stage 0 is what DDP does.
    return overrides


def translate(resolved: ResolvedConfig, to: str, *, python: bool = False, standalone: bool = False) -> Translation:
    """The config of a target tool for a run that is on the target's engine.

    Args:
        resolved: The run.
        to: One of `TARGETS`.
        python: accelerate, hf: Python that makes the objects, instead of the file.
        standalone: deepspeed: with optimizer and scheduler.
    """
    match to:
        case "deepspeed":
            notes = (standalone_notes if standalone else native_notes)(resolved.config)
            return Translation(json.dumps(to_deepspeed(resolved, standalone), indent=2), notes)
        case "fsdp2":
            return Translation(fsdp2_snippet(resolved).rstrip("\n"))
        case "ddp":
            return Translation(ddp_snippet(resolved).rstrip("\n"))
        case "accelerate":
            if python:
                return Translation(accelerate_snippet(resolved).rstrip("\n"))  # Its comments are the notes.
            return Translation(yaml.safe_dump(to_accelerate_yaml(resolved)).rstrip("\n"), accelerate_notes(resolved))
        case _:
            hf = to_hf(resolved)
            native = {} if hf.deepspeed is None else {"deepspeed": hf.deepspeed}
            text = hf_snippet(resolved) if python else json.dumps(hf.arguments | native, indent=2)
            return Translation(text.rstrip("\n"), hf.notes)
