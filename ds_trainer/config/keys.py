"""The schema's leaf keys, their defaults and docs, and the known key that is nearest to a wrong one. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_trainer.config.field_types import Name, Section
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError

FOREIGN_SPELLINGS = {
    "accelerator": "parallel.engine",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "attn_impl": "model.attn_implementation",
    "autotp_size": "parallel.tp",
    "base_model": "model.path",
    "batch_size": "batch.micro_size",
    "bf16": "precision.dtype",
    "bfloat16": "precision.dtype",
    "data_seed": "run.seed",
    "data_types": "precision.grad_dtype",
    "datasets": "data.train",
    "ddp_bucket_cap_mb": "ddp.bucket_cap_mb",
    "ddp_find_unused_parameters": "ddp.find_unused_parameters",
    "deepspeed": "native.deepspeed",
    "eval_dataset": "data.eval",
    "eval_steps": "evaluation.every_steps",
    "flash_attention": "model.attn_implementation",
    "fp16": "precision.dtype",
    "grad_accum": "batch.accumulation",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_checkpointing_enable": "model.gradient_checkpointing",
    "gradient_clipping": "optimizer.max_grad_norm",
    "label_smoothing_factor": "loss.label_smoothing",
    "learning_rate": "optimizer.lr",
    "logging_steps": "logging.every_steps",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "micro_batch": "batch.micro_size",
    "micro_batch_size": "batch.micro_size",
    "mixed_precision": "precision.dtype",
    "model_max_length": "data.max_length",
    "model_name_or_path": "model.path",
    "num_epochs": "run.epochs",
    "num_micro_batches": "batch.accumulation",
    "num_train_epochs": "run.epochs",
    "optim": "optimizer.name",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "per_device_train_batch_size": "batch.micro_size",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "pipeline_parallel_schedule": "parallel.schedule",
    "pipeline_parallel_size": "parallel.pp",
    "pp_degree": "parallel.pp",
    "pp_size": "parallel.pp",
    "report_to": "logging",
    "scheduler": "schedule",
    "sequence_len": "data.max_length",
    "stage3_gather_16bit_weights_on_model_save": "checkpoint.export",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tokenizer_name": "model.tokenizer",
    "torch_dtype": "precision.dtype",
    "tp_size": "parallel.tp",
    "train_batch_size": "batch.global_size",
    "train_dataset": "data.train",
    "train_file": "data.train",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "validation_file": "data.eval",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_stages",
    "zero_optimization": "zero",
    "zero_stage": "zero.stage",
}
"""Keys of transformers, DeepSpeed, axolotl and others by their last part -> the corresponding key here."""


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, f"{key}.")
        else:
            yield key, field


@cache
def leaf_fields() -> Mapping[str, FieldInfo]:
    """Dotted leaf key -> its field, in the order of the schema."""
    return dict(_walk(RunConfig))


@cache
def named_values() -> tuple[str, ...]:
    """Leaf keys whose value maps names that are not keys of the schema, and may hold dots, to strings."""
    return tuple(key for key, field in leaf_fields().items() if dict[Name, Name] in get_args(field.annotation))


@cache
def sections() -> tuple[str, ...]:
    """Dotted names of every section, outer ones first."""
    parts = (key.split(".")[:-1] for key in leaf_fields())
    return tuple(dict.fromkeys(".".join(p[: n + 1]) for p in parts for n in range(len(p))))


def default(key: str) -> Any:
    """Default of a leaf key."""
    return leaf_fields()[key].default


def value(config: RunConfig, key: str) -> Any:
    """Value of a leaf key."""
    node: Any = config
    for part in key.split("."):
        node = node.schema_ if part == "$schema" else getattr(node, part)
    return node


def leaf_values(config: RunConfig) -> dict[str, Any]:
    """Dotted leaf key -> value, in the order of the schema."""
    return {key: value(config, key) for key in leaf_fields()}


def flatten(tree: Mapping[str, Any], prefix: str = "", stop: Collection[str] = ()) -> dict[str, Any]:
    """Nested mapping -> dotted keys; an empty mapping is a value of its own, and so is one at a key of `stop`."""
    flat: dict[str, Any] = {}
    for name, node in tree.items():
        if isinstance(node, Mapping) and node and f"{prefix}{name}" not in stop:
            flat |= flatten(node, f"{prefix}{name}.", stop)
        else:
            flat[f"{prefix}{name}"] = node
    return flat


def assign(tree: dict[str, Any], key: str, item: Any) -> None:
    """Sets a dotted key in a nested mapping.

    Raises:
        ConfigError: A part of the path holds a value instead of a section.
    """
    *path, last = key.split(".")
    node = tree
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"{key} is to be set, but {part} is {json.dumps(node)}",
                "a section is an object",
                f"make {part} an object",
            )
    node[last] = item


def remove(tree: dict[str, Any], path: Sequence[str | int]) -> None:
    """Removes the key at the end of a path of nested mappings, if it is there."""
    node: Any = tree
    for part in path[:-1]:
        node = node.get(part, {})
    node.pop(path[-1], None)


def nearest(key: str) -> str | None:
    """The known key that an unknown dotted key most likely stands for."""
    last = key.rpartition(".")[2]
    if is_comment(last):
        return None
    known = [*leaf_fields(), *sections()]
    by_last_part = {name.rpartition(".")[2]: name for name in reversed(known)}
    if last in FOREIGN_SPELLINGS:
        return FOREIGN_SPELLINGS[last]
    if close := get_close_matches(key, known, n=1, cutoff=0.8):
        return close[0]
    if close := get_close_matches(last, [*by_last_part, *FOREIGN_SPELLINGS], n=1, cutoff=0.8):
        return by_last_part.get(close[0]) or FOREIGN_SPELLINGS[close[0]]
    return None


def is_comment(name: str) -> bool:
    """Whether a key is there to hold a remark, as in files of tools that ignore keys which they do not know."""
    return name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments")


NO_COMMENTS = "remove it: JSON has no comments, and every key is read"


def suggestion(key: str) -> str:
    """What to change about an unknown dotted key: the key that was meant, or where the keys are listed."""
    last, meant = key.rpartition(".")[2], nearest(key)
    if is_comment(last):
        return NO_COMMENTS
    if meant is None:
        return f"remove {key}; `ds-trainer config schema` lists every key"
    if meant == key:
        return f"nest it: {key} is written as sections inside one another, without dots"
    foreign = next((name for name, ours in FOREIGN_SPELLINGS.items() if ours == meant and _alike(name, last)), None)
    if foreign is None:
        return f"did you mean {meant}?"
    return f"{'' if foreign == last else f'did you mean {foreign}? '}{foreign} is called {meant} here"


def _alike(name: str, other: str) -> bool:
    return bool(get_close_matches(name, [other], cutoff=0.8))
