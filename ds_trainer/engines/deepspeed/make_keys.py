"""Writes `deepspeed_keys.json` from the installed DeepSpeed: `python -m ds_trainer.engines.deepspeed.make_keys`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_args

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel, TypeAdapter

from ds_trainer.config.deepspeed.native_keys import ReadRecorder
from ds_trainer.engines.deepspeed.internals import REMOVED_KEYS

TARGET = Path(str(files("ds_trainer.config.deepspeed"))) / "deepspeed_keys.json"

_MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    **{name: field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items() if field.annotation},
}
_READ_KEY_BY_KEY = ("aio", "data_types", "torch_autocast", "flops_profiler", "timers")
"""Sections that DeepSpeed has no model of."""

_COUNT = {"type": ["integer", "null"], "minimum": 1}
_DTYPE = {"type": ["string", "null"], "enum": ["fp32", "fp16", "bf16"]}
_TORCH_DTYPE = {
    "type": ["string", "null"],
    "enum": [
        *("fp32", "float32", "float", "torch.float32", "fp16", "float16", "half", "torch.float16"),
        *("bf16", "bfloat16", "torch.bfloat16"),
    ],
}
_STRINGS = {"type": ["array", "string"], "items": "string"}
_BY_HAND: dict[str, dict[str, Any]] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "steps_per_print": _COUNT,
    "vocabulary_size": _COUNT,
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": _DTYPE,
    "log_level": {"type": ["string", "null"], "enum": ["debug", "info", "warning", "error", "critical"]},
    "data_types.grad_accum_dtype": _TORCH_DTYPE,
    "data_types.param_dtype": _TORCH_DTYPE,
    "data_types.buffer_dtype": _TORCH_DTYPE,
    "data_types.keep_in_fp32_modules": _STRINGS,
    "torch_autocast.dtype": _TORCH_DTYPE | {"type": ["string"]},
    "torch_autocast.lower_precision_safe_modules": {"type": ["array"], "items": "string"},
    "flops_profiler.output_file": {"type": ["string", "null"]},
    **{f"zero_optimization.leaf_module.{name}": _STRINGS for name in ("classes", "names", "name_suffixes")},
}
"""Types that neither a model nor a default says, or that a model's validators widen."""


def make_keys() -> dict[str, dict[str, Any]]:
    """Section ("" for the top level) -> key that DeepSpeed reads in it -> its type."""
    read = {name: ReadRecorder({"dtype": "bfloat16"} if name == "torch_autocast" else {}) for name in _READ_KEY_BY_KEY}
    read["torch_autocast"]["lower_precision_safe_modules"] = []
    top = ReadRecorder({"train_batch_size": 1, **read})
    DeepSpeedConfig(top)
    for name in REMOVED_KEYS:
        top.reads.pop(name, None)
    sections = dict(found for name, model in _MODELS.items() for found in _of_model(name, model))
    sections |= {name: {key: _of_default(default) for key, default in read[name].reads.items()} for name in read}
    sections[""] = {key: _of_default(default) for key, default in top.reads.items()}
    for path in [*_BY_HAND, *filter(None, sections)]:
        section, _, key = path.rpartition(".")
        sections[section][key] = _BY_HAND.get(path, {"type": ["object"]})
    return sections


def _of_model(section: str, model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The types of a section and of the sections in it."""
    kinds: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = [part for part in (field.annotation, *get_args(field.annotation)) if _is_model(part)]
        bounded: Any = Annotated[field.annotation, *field.metadata, ""]
        kind = {} if inner else _of_schema(TypeAdapter(bounded).json_schema())
        kinds |= dict.fromkeys((name, field.alias or name), kind)
        for part in inner:
            yield from _of_model(f"{section}.{name}", part)
    yield section, kinds


def _is_model(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema of pydantic's as one type: alternatives are put together."""
    names: list[str] = []
    kind: dict[str, Any] = {}
    for part in schema.get("anyOf", [schema]):
        names.append(part["type"])
        kind |= {word: part[word] for word in _WORDS if word in part}
        if "type" in part.get("items", {}):
            kind["items"] = part["items"]["type"]
    if "enum" in kind:
        kind["enum"] = list(dict.fromkeys(kind["enum"]))
    return {"type": names, **kind}


_WORDS = ("enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def _of_default(default: Any) -> dict[str, Any]:
    """The type of a key that DeepSpeed reads with this default; None where it is not a plain value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": [names[type(default)]]} if type(default) in names else {"type": ["object"]}


def as_text(table: dict[str, dict[str, Any]]) -> str:
    """The table as it ships, each type on one line."""
    text = json.dumps(table, indent=1, sort_keys=True)
    return (
        re.sub(r'\{\s+"(?:enum|exclusive|items|max|min|type)[^}]*}', lambda f: json.dumps(json.loads(f[0])), text)
        + "\n"
    )


if __name__ == "__main__":
    TARGET.write_text(as_text(make_keys()))
