"""The unified JSON that transformers' `TrainingArguments` mean. Pure.

What they leave out keeps transformers' meaning, not ours: its default is set, and reported with no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ds_trainer.config.accelerate.from_accelerate_fsdp import (
    carry_fsdp,
    carry_parallelism,
    fsdp_engine,
    keep_fsdp_defaults,
)
from ds_trainer.config.deepspeed.from_deepspeed import keep_defaults, read_deepspeed
from ds_trainer.config.hf.from_hf_moments import carry_data, carry_evaluation, carry_logging, carry_saving
from ds_trainer.config.hf.from_hf_training import (
    carry_length,
    carry_optimizer,
    carry_precision,
    carry_recomputing,
    carry_schedule,
)
from ds_trainer.config.hf.hf_given import HFImport
from ds_trainer.config.hf.hf_keys import FIELDS, RENAMED, SAME
from ds_trainer.config.imported import Imported, Line
from ds_trainer.config.keys import assign, default, flatten
from ds_trainer.config.native_files import load_native
from ds_trainer.errors import ConfigError, ConfigErrors

_WITH_OTHERS = {
    *("activation_checkpointing", "gradient_checkpointing", "logging_steps", "eval_steps", "save_steps"),
    *("save_total_limit", "load_best_model_at_end", "resume_from_checkpoint"),
}
"""Fields with a key of their own whose value depends on other fields."""

_DEEPSPEED = "deepspeed: "

_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
"""What `fsdp` may hold as text: FSDP1's strategies, and two switches."""

_HYBRID = "one copy of the model on each machine: their number is parallelism_config.dp_replicate_size, or 1"


def from_hf(arguments: Mapping[str, Any], steps_per_epoch: int | None = None, folder: Path = Path()) -> Imported:
    """The unified JSON of `TrainingArguments`, with one line for each field that is written.

    Args:
        arguments: Field -> value, as in `TrainingArguments.to_dict()`; one that is left out or null has its default.
        steps_per_epoch: Optimizer steps of one pass over the training data; None where the data is not known. What
            is asked for once per epoch then has no number of steps, and the report says how to count them.
        folder: Where files that fields name are looked for, before the working directory.

    Raises:
        ConfigErrors: A value of a wrong type, or a DeepSpeed JSON that contradicts the fields.
        ConfigError: A file that a field names cannot be read; bf16 and fp16 together; an unknown word in fsdp.
    """
    given = HFImport(arguments, steps_per_epoch, folder)
    native = _section(given, "deepspeed")
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
        _carry_fsdp(given)
    else:
        given.found.carry("deepspeed", None, {"parallel.engine": "ddp"}, "without DeepSpeed and FSDP it is DDP")
    if engine != "fsdp2":
        given.drop("fsdp", "DeepSpeed takes its place" if given["fsdp"] else "it is off: nothing is lost")
        given.drop("fsdp_config", "without fsdp it is not read: nothing is lost")
    if "parallelism_config" in given.asked:
        for name, item in given["parallelism_config"].items():
            carry_parallelism(given.found, f"parallelism_config.{name}", item)
    _report_the_rest(given)
    given.carry_defaults()
    return given.found


def _carry_same(given: HFImport, engine: str) -> None:
    for name, key in SAME.items():
        usual = FIELDS[name].default
        if name in _WITH_OTHERS:
            continue
        if key.startswith("ddp.") and engine != "ddp":
            given.drop(name, f"it is about DDP, and this is {engine}: nothing is lost")
        elif given.holds(name) or usual not in (None, default(key)):
            given.carry(name, {key: given[name]})


def _report_the_rest(given: HFImport) -> None:
    for name in given.asked:
        field = FIELDS.get(name)
        if field is None:
            close = get_close_matches(name, [*FIELDS, *RENAMED], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            given.drop(name, f"unknown: TrainingArguments of transformers 5.24 has no such field{meant}")
        elif field.why and field.anyway:
            given.carry(name, {}, field.why)
        elif field.why:
            given.drop(name, field.why)


def _section(given: HFImport, name: str) -> dict[str, Any] | None:
    """A field that holds a mapping or the path of a file with one; None where it is not set."""
    item = given[name]
    if not isinstance(item, str):
        return item or None
    beside = given.folder / item
    return load_native(beside if beside.exists() else Path(item))


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
    whole: dict[str, Any] = {}
    for key, item in flatten(native).items():
        assign(whole, key, values[key] if key in autos else item)
    found = read_deepspeed(whole)
    found.lines = [
        replace(line, value="auto", note="; ".join(filter(None, ("filled in from the arguments", line.note))))
        if line.key in autos
        else line
        for line in found.lines
    ]
    return found


def _lay_over(found: Imported, deepspeed: Imported) -> None:
    """Adds a DeepSpeed JSON's keys and lines, and last DeepSpeed's defaults for what neither says.

    Raises:
        ConfigErrors: It says something else than a field does.
    """
    if errors := list(_contradictions(found, deepspeed)):
        raise ConfigErrors(errors)
    said = {key for line in found.lines for key in line.ours}
    theirs = flatten(deepspeed.tree)
    for line in deepspeed.lines:
        is_default = line.value is None and bool(line.ours)
        if not is_default or not said & set(line.ours):
            found.lines.append(replace(line, key=f"{_DEEPSPEED}{line.key}"))
            said |= set(line.ours)
            for key in set(line.ours) & theirs.keys():
                assign(found.tree, key, theirs[key])
    before = len(found.lines)
    keep_defaults(found)
    found.lines[before:] = [replace(line, key=f"{_DEEPSPEED}{line.key}") for line in found.lines[before:]]


def _contradictions(found: Imported, deepspeed: Imported) -> Iterator[ConfigError]:
    ours, theirs = flatten(found.tree), flatten(deepspeed.tree)
    asked = {key: line for line in found.lines for key in line.ours}
    for line in deepspeed.lines:
        for key in line.ours:
            if line.value is not None and key in asked and key in theirs and theirs[key] != ours[key]:
                field = asked[key]
                value = ours[key] if field.value is None else field.value
                yield ConfigError(
                    f"{field.key} is {value!r}, and {line.key} of the DeepSpeed JSON is {line.value!r}",
                    "transformers takes a value that the DeepSpeed JSON says too only where both are the same",
                    f'set {line.key} to "auto", or both to the same',
                )


def _carry_fsdp(given: HFImport) -> None:
    """`fsdp` and `fsdp_config`, in accelerate's words.

    Source: transformers 5.24, `TrainingArguments._process_fsdp_args`.
    """
    written = _section(given, "fsdp_config") or {}
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
        replace(line, fate="changed", note=_HYBRID) if hybrid and "parallel.dp_replicate" in line.ours else line
        for line in given.found.lines[before:]
    ]


def _as_written(line: Line, name: str, in_file: Mapping[str, Any], by_words: Mapping[str, Any]) -> Line:
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
