"""The unified JSON that transformers' `TrainingArguments` mean. Pure.

What they leave out keeps transformers' meaning, not ours: its default is set, and reported with no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ds_trainer.config.keys import assign, default, flatten
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.interop.accelerate.import_fsdp import carry_parallelism
from ds_trainer.interop.deepspeed.importer import keep_defaults, read_deepspeed
from ds_trainer.interop.hf.arguments import HFImport
from ds_trainer.interop.hf.fields import KEY_OF_FIELD, RENAMED, TRAINING_ARGUMENTS
from ds_trainer.interop.hf.import_fsdp import carry_fsdp_fields
from ds_trainer.interop.hf.import_intervals import carry_data, carry_evaluation, carry_logging, carry_saving
from ds_trainer.interop.hf.import_optimization import (
    carry_length,
    carry_optimizer,
    carry_precision,
    carry_recomputing,
    carry_schedule,
)
from ds_trainer.interop.hf.trl import TRL_FIELDS, carry_trl_field
from ds_trainer.interop.import_result import Imported

_WITH_OTHERS = {
    *("activation_checkpointing", "gradient_checkpointing", "logging_steps", "eval_steps", "save_steps"),
    *("save_total_limit", "load_best_model_at_end", "resume_from_checkpoint"),
}
"""Fields with a key of their own whose value depends on other fields."""

_DEEPSPEED = "deepspeed: "
_TP_SIZE = "tp_size"


def from_hf(arguments: Mapping[str, Any], steps_per_epoch: int | None = None, folder: Path = Path()) -> Imported:
    """The unified JSON of `TrainingArguments`, with one line for each field that is written.

    Args:
        arguments: Field -> value, as in `TrainingArguments.to_dict()`; one that is left out or null has its default.
        steps_per_epoch: Optimizer steps of one pass over the training data; None where the data is not known. What
            is due once per epoch then has no number of steps, and the report says how to count them.
        folder: Where files that fields name are looked for, before the working directory.

    Raises:
        ConfigErrors: A value of a wrong type, or a DeepSpeed JSON that contradicts the fields.
        ConfigError: A file that a field names cannot be read; bf16 and fp16 together; an unknown option in fsdp.
    """
    given = HFImport(arguments, steps_per_epoch, folder)
    native = given.section("deepspeed")
    has = {key.partition(".")[0] for key in flatten(native or {})}
    engine = "deepspeed" if native is not None else "fsdp2" if given["fsdp"] else "ddp"
    _carry_same(given, engine)
    carry_length(given)
    carry_optimizer(given, "optimizer" in has)
    carry_schedule(given, "scheduler" in has)
    carry_precision(given, native is not None)
    carry_recomputing(given)
    carry_data(given)
    carry_logging(given)
    carry_evaluation(given)
    carry_saving(given)
    if native is not None:
        given.carry("deepspeed", {"parallel.engine": "deepspeed"}, "its keys follow")
        _lay_over(given.found, _filled_in(native, given))
    elif engine == "fsdp2":
        carry_fsdp_fields(given)
    else:
        given.found.carry("deepspeed", None, {"parallel.engine": "ddp"}, "without DeepSpeed and FSDP it is DDP")
    if engine != "fsdp2":
        given.drop("fsdp", "DeepSpeed takes its place" if given["fsdp"] else "it is off: nothing is lost")
        given.drop("fsdp_config", "without fsdp it is not read: nothing is lost")
    if "parallelism_config" in given.set_fields:
        for name, item in given["parallelism_config"].items():
            carry_parallelism(given.found, f"parallelism_config.{name}", item)
    _report_the_rest(given)
    given.carry_defaults()
    return given.found


def _carry_same(given: HFImport, engine: str) -> None:
    for name, key in KEY_OF_FIELD.items():
        usual = TRAINING_ARGUMENTS[name].default
        if name in _WITH_OTHERS:
            continue
        if key.startswith("ddp.") and engine != "ddp":
            given.drop(name, f"it is about DDP, and this is {engine}: nothing is lost")
        elif given.holds(name) or usual not in (None, default(key)):
            given.carry(name, {key: given[name]})


def _report_the_rest(given: HFImport) -> None:
    for name in given.set_fields:
        field = TRAINING_ARGUMENTS.get(name)
        if name == _TP_SIZE:
            size = given.set_fields[name]
            given.carry(name, {} if size in (0, 1) else {"parallel.tp": size}, "a field of transformers 4")
        elif name in TRL_FIELDS:
            carry_trl_field(given, name)
        elif field is None:
            close = get_close_matches(name, [*TRAINING_ARGUMENTS, *RENAMED, *TRL_FIELDS], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            given.drop(name, f"unknown: TrainingArguments of transformers 5.24 has no such field{meant}")
        elif field.why and field.anyway:
            given.carry(name, {}, field.why)
        elif field.why:
            given.drop(name, field.why)


def _filled_in(native: dict[str, Any], given: HFImport) -> Imported:
    """A DeepSpeed JSON whose "auto" values are those of the fields, as transformers fills them in.

    Source: transformers 5.24, integrations/deepspeed.py.
    """
    steps, warmup = given["max_steps"], given["warmup_steps"]
    values = {
        "train_micro_batch_size_per_gpu": given["per_device_train_batch_size"],
        "gradient_accumulation_steps": given["gradient_accumulation_steps"],
        "gradient_clipping": given["max_grad_norm"],
        "optimizer.params.lr": given["learning_rate"],
        "optimizer.params.betas": [given["adam_beta1"], given["adam_beta2"]],
        "optimizer.params.eps": given["adam_epsilon"],
        "optimizer.params.weight_decay": given["weight_decay"],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": given["learning_rate"],
        "scheduler.params.warmup_num_steps": None if 0 < warmup < 1 else max(1, int(warmup)),
        "scheduler.params.total_num_steps": steps if steps > 0 else None,
        "fp16.enabled": given["fp16"],
        "bf16.enabled": given["bf16"],
    }
    autos = {key for key, item in flatten(native).items() if item == "auto" and values.get(key) is not None}
    filled: dict[str, Any] = {}
    for key, item in flatten(native).items():
        assign(filled, key, values[key] if key in autos else item)
    found = read_deepspeed(filled)
    found.lines = [
        replace(line, value="auto", note="; ".join(filter(None, ("filled in from the arguments", line.note))))
        if line.key in autos
        else line
        for line in found.lines
    ]
    return found


def _lay_over(found: Imported, deepspeed: Imported) -> None:
    """Adds a DeepSpeed JSON's keys and lines, and then DeepSpeed's defaults for keys that neither sets.

    Raises:
        ConfigErrors: It contradicts a field.
    """
    if errors := list(_contradictions(found, deepspeed)):
        raise ConfigErrors(errors)
    set_keys = {key for line in found.lines for key in line.ours}
    theirs = flatten(deepspeed.tree)
    for line in deepspeed.lines:
        is_default = line.value is None and bool(line.ours)
        if not is_default or not set_keys & set(line.ours):
            found.lines.append(replace(line, key=f"{_DEEPSPEED}{line.key}"))
            set_keys |= set(line.ours)
            for key in set(line.ours) & theirs.keys():
                assign(found.tree, key, theirs[key])
    before = len(found.lines)
    keep_defaults(found)
    found.lines[before:] = [replace(line, key=f"{_DEEPSPEED}{line.key}") for line in found.lines[before:]]


def _contradictions(found: Imported, deepspeed: Imported) -> Iterator[ConfigError]:
    ours, theirs = flatten(found.tree), flatten(deepspeed.tree)
    by_key = {key: line for line in found.lines for key in line.ours}
    for line in deepspeed.lines:
        for key in line.ours:
            if line.value is not None and key in by_key and key in theirs and theirs[key] != ours[key]:
                field = by_key[key]
                value = ours[key] if field.value is None else field.value
                yield ConfigError(
                    f"{field.key} is {value!r}, and {line.key} of the DeepSpeed JSON is {line.value!r}",
                    "transformers accepts a value that is also in the DeepSpeed JSON only where both are the same",
                    f'set {line.key} to "auto", or both to the same',
                )
