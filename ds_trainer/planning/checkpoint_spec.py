"""Reads shapes and limits of a checkpoint from `config.json` and the safetensors headers alone. Pure."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from ds_trainer.errors import ModelError
from ds_trainer.planning.positions import position_limit

CONFIG_KEYS = (
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
)
"""Keys of config.json that are read here, by the names that most model types have for them."""


@dataclass(frozen=True)
class Family:
    """What transformers knows of one model type, as shipped in `families.json`.

    Args:
        aliases: Our attribute name -> the name that this type's config.json uses.
        tied: Whether the head shares the embedding when config.json does not say.
        conversion: What loading does to checkpoint tensors: None, `rename`, or `merge` (merge, split or transpose).
        tp_plan: Module name of the class for causal language models, every number as `*` -> tensor-parallel style;
            empty where there is no plan.
        pp_plan: The fields of `ds_trainer.planning.pp_plan.StagePlan`; None where the type cannot be split into stages.
        pp_refused: Why it cannot; None where it can.
    """

    aliases: dict[str, str]
    tied: bool
    conversion: str | None
    tp_plan: dict[str, str]
    pp_plan: dict[str, Any] | None
    pp_refused: str | None


@cache
def families() -> dict[str, Family]:
    """Model type -> family, for every type of transformers' causal-LM mapping when the table was made."""
    table = json.loads(files("ds_trainer.planning").joinpath("families.json").read_text())
    return {name: Family(**row) for name, row in table.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Args:
        dtype: By its safetensors name (`F32`, `BF16`, ...).
        shape: Shape.
        file: File that holds it, relative to the checkpoint's folder.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and limits of a checkpoint.

    Args:
        folder: The checkpoint's folder.
        model_type: `model_type` of config.json.
        hidden_size: Width of the residual stream; None where the config names none.
        vocab_size: Rows of the embedding.
        max_positions: Longest sequence; None where there is no limit.
        tied: Whether the head shares the embedding.
        tensors: Checkpoint name -> tensor; empty when the weights are pickled.
        pickled: Whether the only weights are `pytorch_model*.bin`.
        family: What the shipped table says of this model type; None for a type it does not know, which is then only
            checked when the model is loaded.
        config: The language model's part of config.json, with `CONFIG_KEYS` under those names.
        architectures: Classes that config.json says the weights are of.
        is_quantized: Whether config.json says that the weights are.
    """

    folder: str
    model_type: str
    hidden_size: int | None
    vocab_size: int | None
    max_positions: int | None
    tied: bool
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    pickled: bool = False
    family: Family | None = None
    config: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    is_quantized: bool = False

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors, a tied one once; 0 when the weights are pickled."""
        return sum(prod(tensor.shape) for tensor in self.distinct().values())

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter; 0 when the weights are pickled.

        An upper bound where transformers merges the experts of a layer into one tensor on load.
        """
        return self.largest({name: prod(tensor.shape) for name, tensor in self.distinct().items()})

    def largest(self, sizes: Mapping[str, int]) -> int:
        """Elements of the largest parameter, by the elements of each tensor of the checkpoint."""
        merged: dict[str, int] = {}
        merges = self.family is not None and self.family.conversion == "merge"
        for name, size in sizes.items():
            key = re.sub(r"\.experts\.\d+\..*", ".experts", name) if merges else name
            merged[key] = merged.get(key, 0) + size
        return max(merged.values(), default=0)

    def distinct(self) -> dict[str, TensorInfo]:
        """Tensors without the duplicates of the embedding that a tied model's checkpoint may hold."""
        embedding = (self.vocab_size, self.hidden_size)
        copies = [name for name, t in self.tensors.items() if t.shape == embedding and not re.search(r"\.\d+\.", name)]
        drop = set(copies[1:]) if self.tied else set()
        return {name: t for name, t in self.tensors.items() if name not in drop}


def read_spec(folder: str) -> ModelSpec:
    """Reads a checkpoint's `config.json` and the headers of its safetensors files.

    Raises:
        ModelError: The folder, its config or a weight file is missing, truncated or not readable.
    """
    if not Path(folder).is_dir():
        raise ModelError(
            f"there is no folder {folder}", "model.path names the folder of a checkpoint, or a hub id", "set model.path"
        )
    _check_no_adapter(folder)
    config = _read_json(Path(folder, "config.json"), "a checkpoint has a config.json that transformers can read")
    model_type = str(config.get("model_type", ""))
    text: dict[str, Any] = next(
        (config[k] for k in ("text_config", "decoder") if isinstance(config.get(k), dict)), config
    )
    family = families().get(text.get("model_type", model_type))
    aliases = family.aliases if family else {}
    text = text | {key: text[name] for key, name in aliases.items() if name in text and key not in text}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", bool(family and family.tied)))
    pickled = not safetensors_files(folder) and bool(pickled_files(folder))
    return ModelSpec(
        folder=folder,
        model_type=model_type,
        hidden_size=text.get("hidden_size"),
        vocab_size=text.get("vocab_size"),
        max_positions=position_limit(text),
        tied=bool(tied),
        tensors={} if pickled else read_headers(folder),
        pickled=pickled,
        family=family,
        config=text,
        architectures=tuple(config.get("architectures") or ()),
        is_quantized=config.get("quantization_config") is not None,
    )


def _check_no_adapter(folder: str) -> None:
    adapter = Path(folder, "adapter_config.json")
    if not adapter.is_file() or Path(folder, "config.json").is_file():
        return
    settings = _read_json(adapter, "an adapter's settings are JSON")
    base = settings.get("base_model_name_or_path") or "a base model"
    raise ModelError(
        f"{folder} holds a {settings.get('peft_type', 'PEFT')} adapter of {base}, and no model",
        "all parameters of a full checkpoint are trained; an adapter only has what is added to one",
        f"set model.path to {base}, or merge the adapter into it: peft's "
        "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OTHER)",
    )


def quantized_error(folder: str) -> ModelError:
    """The error about a checkpoint that is quantized."""
    return ModelError(
        f"config.json of {folder} has a quantization_config",
        "all parameters are trained, so they must be stored as floating-point numbers",
        "set model.path to the checkpoint before quantization",
    )


def read_headers(folder: str) -> dict[str, TensorInfo]:
    """Every tensor of a folder's safetensors files.

    Raises:
        ModelError: There is no such file, one that the index names is missing, or one is truncated.
    """
    names = safetensors_files(folder)
    if not names:
        raise ModelError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json",
            "a checkpoint's weights are safetensors files",
            "set model.path to a folder with weights, or convert them with `save_pretrained`",
        )
    return {key: info for name in names for key, info in _read_header(Path(folder, name)).items()}


def safetensors_files(folder: str) -> list[str]:
    """Names of the safetensors files that hold the weights, single file before index, as transformers picks them."""
    return _weight_files(folder, "model.safetensors")


def pickled_files(folder: str) -> list[str]:
    """Names of the pickled files that hold the weights."""
    return _weight_files(folder, "pytorch_model.bin")


def _weight_files(folder: str, single: str) -> list[str]:
    if Path(folder, single).is_file():
        return [single]
    index = Path(folder, f"{single}.index.json")
    if not index.is_file():
        return []
    names = sorted(set(_read_json(index, "an index maps tensors to files").get("weight_map", {}).values()))
    missing = [name for name in names if not Path(folder, name).is_file()]
    if missing:
        raise ModelError(
            f"{index} names files that are not there: {', '.join(missing)}",
            "every file of a sharded checkpoint must be present",
            "complete the download of model.path",
        )
    return names


def _read_json(path: Path, rule: str) -> dict[str, Any]:
    change = "set model.path to a complete checkpoint"
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ModelError(f"there is no {path}", rule, change) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", rule, change) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}", rule, change)
    return value


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file, whose size must be what its header says.

    Source: https://github.com/huggingface/safetensors#format: 8 bytes little-endian header length, JSON, then the data.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(t["dtype"], tuple(t["shape"]), path.name) for name, t in header.items()}
        expected = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
        if size != expected:
            raise ValueError(f"{size} bytes where the header announces {expected}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is truncated or corrupt: {error}",
            "a safetensors file holds a header and exactly the bytes that it announces",
            "download or export the file again",
        ) from error
    return tensors
