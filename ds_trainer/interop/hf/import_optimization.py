"""The fields of `TrainingArguments` for the optimizer, schedule, length and dtypes of a run. Pure.

Source: transformers 5.24, trainer_optimizer.py and optimization.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ds_trainer.errors import ConfigError
from ds_trainer.interop.hf.arguments import HFImport

Ours = dict[str, Any]

_MOMENTS = ("adam_beta1", "adam_beta2")
_STATES = "its states are fp32 here"
_ADAFACTOR = (
    "torch.optim.Adafactor multiplies the rate by the RMS of each tensor (some 0.02 for weights) and caps it at "
    "1/sqrt(step), transformers' does neither: at the same learning_rate weights move far less, so raise it"
)
_OPTIMIZERS: dict[str, tuple[Ours, str]] = {
    "adamw_torch": ({"optimizer.name": "adamw", "optimizer.fused": False}, ""),
    "adamw_torch_fused": ({"optimizer.name": "adamw"}, ""),
    "lion_32bit": ({"optimizer.name": "lion"}, ""),
    "sgd": ({"optimizer.name": "sgd"}, ""),
    "adafactor": ({"optimizer.name": "adafactor"}, _ADAFACTOR),
    "adamw_8bit": ({"optimizer.name": "adamw"}, _STATES),
    "adamw_bnb_8bit": ({"optimizer.name": "adamw"}, _STATES),
    "adamw_torch_4bit": ({"optimizer.name": "adamw"}, _STATES),
    "adamw_torch_8bit": ({"optimizer.name": "adamw"}, _STATES),
    "adamw_anyprecision": ({"optimizer.name": "adamw"}, _STATES),
    "paged_adamw_8bit": ({"optimizer.name": "adamw"}, f"{_STATES}, and not paged; see zero.offload_optimizer"),
    "paged_adamw_32bit": ({"optimizer.name": "adamw"}, "states are not paged; see zero.offload_optimizer"),
    "adamw_apex_fused": ({"optimizer.name": "adamw"}, "torch's own fused kernel"),
    "lion_8bit": ({"optimizer.name": "lion"}, _STATES),
    "paged_lion_8bit": ({"optimizer.name": "lion"}, f"{_STATES}, and not paged"),
    "paged_lion_32bit": ({"optimizer.name": "lion"}, "states are not paged"),
}
"""`optim` -> our keys, and what is not the same."""


def carry_optimizer(given: HFImport, is_in_deepspeed: bool) -> None:
    """`optim` and what it reads; a DeepSpeed JSON with an optimizer takes their place."""
    optim = str(given["optim"])
    ours, note = _OPTIMIZERS.get(optim, ({}, ""))
    name = ours.get("optimizer.name", "adamw")
    if is_in_deepspeed:
        given.drop("optim", "the optimizer of the DeepSpeed JSON takes its place: nothing is lost")
    elif not ours:
        given.drop("optim", "there is no such optimizer here; set optimizer.name, which is adamw until you do")
    elif "optim" in given.set_fields:
        given.carry("optim", ours, note, changed=bool(note))
    _carry_optim_args(given, name)
    moments = {"optimizer.betas": [given[field] for field in _MOMENTS]}
    for field, readers, led_to in (
        ("adam_beta1", ("adamw", "lion"), moments),
        ("adam_beta2", ("adamw", "lion"), moments),
        ("adam_epsilon", ("adamw",), {"optimizer.eps": given["adam_epsilon"]}),
    ):
        if name not in readers:
            given.drop(field, f"{name} does not read it: nothing is lost")
        elif field in given.set_fields:
            given.carry(field, led_to)


def _carry_optim_args(given: HFImport, name: str) -> None:
    text = str(given["optim_args"] or "").replace(" ", "")
    options = dict(part.partition("=")[::2] for part in text.split(",") if part)
    if name == "sgd" and options.keys() == {"momentum"}:
        given.carry("optim_args", {"optimizer.momentum": float(options["momentum"])})
    else:
        given.drop("optim_args", "the settings of an optimizer are in the optimizer section")


def carry_schedule(given: HFImport, is_in_deepspeed: bool) -> None:
    """`lr_scheduler_type` and what it reads; a DeepSpeed JSON with a scheduler takes their place."""
    kind, options = str(given["lr_scheduler_type"]), dict(given["lr_scheduler_kwargs"] or {})
    fields = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
    if is_in_deepspeed:
        for field in fields[:2]:
            given.drop(field, "the scheduler of the DeepSpeed JSON takes its place: nothing is lost")
        _carry_warmup(given)
        return
    if kind not in _SCHEDULES:
        given.drop(fields[0], "there is no such schedule here; set schedule.name, which is cosine until you do")
        given.drop(fields[1], f"{kind} alone reads it")
        _carry_warmup(given)
        return
    ours, note = _SCHEDULES[kind](given, options)
    shape = {"schedule.name": ours.pop("schedule.name")}
    given.carry(fields[0], shape if options else shape | ours, note, changed=bool(note))
    if "lr_scheduler_kwargs" in given.set_fields:
        given.carry(fields[1], ours, "" if ours else "see lr_scheduler_type")
    if kind == "constant":
        given.drop("warmup_steps", "transformers' constant schedule has no warm-up: nothing is lost")
    else:
        _carry_warmup(given)


def _carry_warmup(given: HFImport) -> None:
    if "warmup_steps" in given.set_fields:
        steps = given["warmup_steps"]
        given.carry(
            "warmup_steps",
            {"schedule.warmup_ratio" if steps < 1 else "schedule.warmup_steps": _integer_from_one(steps)},
        )


def _integer_from_one(number: float) -> float:
    return int(number) if number >= 1 else number


def _constant(given: HFImport, options: Mapping[str, Any]) -> tuple[Ours, str]:
    return {"schedule.name": "constant"}, ""


def _linear(given: HFImport, options: Mapping[str, Any]) -> tuple[Ours, str]:
    return {"schedule.name": "linear"}, ""


def _polynomial(given: HFImport, options: Mapping[str, Any]) -> tuple[Ours, str]:
    note = "" if options.get("power", 1.0) == 1.0 else "it falls in a straight line here"
    return {"schedule.name": "linear", "schedule.min_lr_ratio": _ratio(given, options.get("lr_end", 1e-7))}, note


def _cosine(given: HFImport, options: Mapping[str, Any]) -> tuple[Ours, str]:
    ours: Ours = {"schedule.name": "cosine"}
    if "min_lr_rate" in options or "min_lr" in options:
        rate = options.get("min_lr_rate")
        ours["schedule.min_lr_ratio"] = _ratio(given, options["min_lr"]) if rate is None else rate
    waves = {"cosine_with_restarts": 1}.get(str(given["lr_scheduler_type"]), 0.5)
    note = "" if options.get("num_cycles", waves) == waves else "it falls once here, with no restart"
    if given["lr_scheduler_type"] == "cosine_warmup_with_min_lr":
        note = "the warm-up begins at zero here"
    return ours, note


def _wsd(given: HFImport, options: Mapping[str, Any]) -> tuple[Ours, str]:
    ours: Ours = {"schedule.name": "wsd"}
    total, notes = given.total_steps, []
    if total is not None:
        # Rounded down: rounded up, the decay would begin a step earlier.
        ours["schedule.decay_ratio"] = math.floor(options["num_decay_steps"] / total * 1e12) / 1e12
    else:
        notes.append("the decay is a fraction of all steps here: set schedule.decay_ratio")
    if options.get("min_lr_ratio"):
        ours["schedule.min_lr_ratio"] = options["min_lr_ratio"]
        notes.append("the warm-up begins at zero here")
    if options.get("decay_type", "cosine") != "linear":
        notes.append("the decay is linear here")
    if options.get("warmup_type", "linear") != "linear":
        notes.append("the warm-up is linear here")
    return ours, "; ".join(notes)


def _ratio(given: HFImport, floor: float) -> float:
    """A learning rate as a fraction of the peak, without the rounding error of the division."""
    return float(f"{floor / given['learning_rate']:.12g}")


_SCHEDULES: dict[str, Callable[[HFImport, Mapping[str, Any]], tuple[Ours, str]]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine,
    "cosine_with_min_lr": _cosine,
    "cosine_warmup_with_min_lr": _cosine,
    "warmup_stable_decay": _wsd,
}


def carry_length(given: HFImport) -> None:
    """`max_steps`, which overrides `num_train_epochs`."""
    steps, epochs = given["max_steps"], given["num_train_epochs"]
    if steps > 0:
        given.carry("max_steps", {"run.max_steps": steps})
        given.drop("num_train_epochs", "max_steps overrides it: nothing is lost")
        return
    if "max_steps" in given.set_fields:
        given.drop("max_steps", "below 1 it says nothing: nothing is lost")
    if epochs != int(epochs) and given.total_steps is not None:
        given.carry("num_train_epochs", {"run.max_steps": given.total_steps}, "epochs are integers here")
        return
    note = "" if epochs == int(epochs) else "epochs are integers here: set run.max_steps to end within one"
    given.carry("num_train_epochs", {"run.epochs": math.ceil(epochs)}, note, changed=bool(note))


def carry_precision(given: HFImport, is_in_deepspeed: bool) -> None:
    """`bf16` and `fp16`; with neither, transformers computes in the dtype in which the model was loaded.

    Raises:
        ConfigError: Both.
    """
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if given[one] and given[other]:
            raise ConfigError(
                f"{one} and {other} are both true",
                "a run computes in one dtype, and TrainingArguments take one of them",
                f"remove {one} or {other}",
            )
    for field in ("bf16", "fp16"):
        if field in given.set_fields:
            given.carry(field, {"precision.dtype": field}, "over fp32 master weights")
    if not is_in_deepspeed and not given["bf16"] and not given["fp16"]:
        note = "transformers computes in the dtype in which the model was loaded"
        given.carry("bf16", {"precision.dtype": "fp32"}, note)


def carry_recomputing(given: HFImport) -> None:
    """Activation checkpointing, under its name and the older one, and compilation."""
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if name in given.set_fields]
    for name in names:
        note = "" if name == names[0] else f"the older name of {names[0]}"
        given.carry(name, {"model.gradient_checkpointing": bool(given[names[0]])}, note)
    for options in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if given[options] == {"use_reentrant": False}:
            given.carry(options, {}, "so it is here")
        elif given[options]:
            given.drop(options, "every layer is recomputed, without reentrance")
    compiles = {"model.compile": True}
    if given["torch_compile"]:
        given.carry("torch_compile", compiles, "each block by itself, and not the whole model", changed=True)
    backend = given["torch_compile_backend"]
    if backend == "inductor":
        given.carry("torch_compile_backend", compiles)
    elif backend is not None:
        given.carry("torch_compile_backend", compiles, "inductor is used", changed=True)
