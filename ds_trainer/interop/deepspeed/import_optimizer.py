"""The `optimizer` and `scheduler` sections of a DeepSpeed JSON, in unified keys. Pure.

Source: deepspeed/runtime/engine.py `_configure_basic_optimizer` and runtime/lr_schedules.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.interop.import_result import Imported

OPTIMIZER_KEYS = {
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.momentum": "optimizer.momentum",
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.total_num_steps": "run.max_steps",
    "scheduler.params.cos_min_ratio": "schedule.min_lr_ratio",
}
"""Native dotted key of the two sections -> the unified key that corresponds to it."""

_READS = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
    "sgd": ("lr", "weight_decay", "momentum"),
}

_ANYWAY = {
    "optimizer.params.bias_correction": (True, "the moments' bias is always corrected"),
    "optimizer.params.amsgrad": (False, "there is no amsgrad"),
    "optimizer.params.nesterov": (False, "there is no Nesterov momentum"),
    "optimizer.params.dampening": (0, "there is no dampening"),
    "optimizer.params.fp32_optimizer_states": (True, "optimizer states are always fp32"),
    "scheduler.params.warmup_min_lr": (0, "the warm-up begins at 0"),
    "scheduler.params.warmup_min_ratio": (0, "the warm-up begins at 0"),
    "scheduler.params.warmup_type": ("linear", "the warm-up is linear"),
    "scheduler.params.last_batch_iteration": (-1, "the schedule begins at the first step"),
}
"""Key -> the value that describes what happens here in any case, and a note."""

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULE_READS = {
    "WarmupLR": ("warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps", "cos_min_ratio"),
}
_DEFAULTS: dict[str, dict[str, float]] = {
    "WarmupLR": {"warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_num_steps": 1000, "warmup_max_lr": 1e-3},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "cos_min_ratio": 1e-4},
}
_LR, _DECAY = "optimizer.params.lr", "optimizer.params.weight_decay"


def carry_optimizer(found: Imported, flat: Mapping[str, Any], key: str, item: Any) -> None:
    """Adds the line of a key of the `optimizer` section.

    Args:
        found: The import.
        flat: Every dotted key of the file.
        key: The key.
        item: Its value.
    """
    name, param = _optimizer(flat), key.removeprefix("optimizer.params.")
    if name is None:
        kind = flat.get("optimizer.type", "optimizer without a type")
        found.drop(key, item, f"there is no {kind} here; set optimizer.name, which is adamw until you do")
    elif key == "optimizer.type":
        note = "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if (item, name) == ("Adam", "adamw") else ""
        found.carry(key, item, {"optimizer.name": name}, note)
    elif param in ("adam_w_mode", "torch_adam"):
        found.carry(key, item, {}, f"optimizer.name is {name}; torch's kernels are used unless it is offloaded")
    elif key == _LR and _peak(flat) not in (None, item):
        found.drop(key, item, "DeepSpeed's scheduler overwrites it with its warmup_max_lr: nothing is lost")
    elif key == _DECAY and item:
        found.carry(key, item, _decay(item), "DeepSpeed's optimizer decays every parameter it is given")
    elif param in _READS[name]:
        found.carry(key, item, {OPTIMIZER_KEYS[key]: item})
    else:
        _carry_other(found, key, item, "set what you need under optimizer")


def carry_scheduler(found: Imported, flat: Mapping[str, Any], key: str, item: Any) -> None:
    """Adds the line of a key of the `scheduler` section; arguments as in `carry_optimizer`."""
    kind, param = _schedule(flat), key.removeprefix("scheduler.params.")
    if kind not in _SCHEDULES:
        named = kind or "scheduler without a type"
        found.drop(key, item, f"there is no {named} here; set schedule.name, which is cosine until you do")
    elif key == "scheduler.type":
        note = "DeepSpeed's runs one step later: its first two steps have the warm-up's first learning rate"
        found.carry(key, item, {"schedule.name": _SCHEDULES[kind]}, note, changed=True)
    elif param in _SCHEDULE_READS[kind]:
        found.carry(key, item, {OPTIMIZER_KEYS[key]: item})
    else:
        _carry_other(found, key, item, "set what you need under schedule")


def keep_optimizer_defaults(found: Imported, flat: Mapping[str, Any]) -> None:
    """Sets DeepSpeed's defaults of the optimizer and the schedule that the file names, where ours differ."""
    has_optimizer, kind = _optimizer(flat) is not None, _schedule(flat)
    for param, item in _DEFAULTS.get(kind or "", {}).items():
        key = f"scheduler.params.{param}"
        if key not in flat:
            found.keep(key, {OPTIMIZER_KEYS[key]: item}, f"DeepSpeed's default: {item:g}")
    if kind in _SCHEDULES and "scheduler.params.warmup_type" not in flat:
        note = "the warm-up is linear; DeepSpeed's default is logarithmic"
        found.keep("scheduler.params.warmup_type", {}, note, changed=True)
    if has_optimizer and kind is None and "auto" not in flat.values():
        found.keep("scheduler", {"schedule.name": "constant"}, "without one, DeepSpeed's learning rate stays")
    if has_optimizer and not any("optimizer.lr" in line.ours for line in found.lines):
        found.keep(_LR, {"optimizer.lr": 1e-3}, "DeepSpeed's default: 1e-3")
    if _optimizer(flat) == "adamw" and flat.get("optimizer.params.torch_adam") is True and _DECAY not in flat:
        found.keep(_DECAY, _decay(0.01), "the default of torch.optim.AdamW, which torch_adam asks for: 0.01")


def _decay(item: Any) -> dict[str, Any]:
    return {"optimizer.weight_decay": item, "optimizer.decay_norms_and_biases": True}


def _optimizer(flat: Mapping[str, Any]) -> str | None:
    kind = str(flat.get("optimizer.type")).lower()
    if kind == "adam" and flat.get("optimizer.params.adam_w_mode") is not False:
        return "adamw"
    return kind if kind in _READS else None


def _schedule(flat: Mapping[str, Any]) -> str | None:
    kind = flat.get("scheduler.type")
    return None if kind is None else str(kind)


def _peak(flat: Mapping[str, Any]) -> Any:
    """The learning rate that the scheduler writes over the optimizer's; None where it does not."""
    kind = _schedule(flat) or ""
    if "warmup_max_lr" not in _SCHEDULE_READS.get(kind, ()):
        return None
    peak = flat.get("scheduler.params.warmup_max_lr", _DEFAULTS[kind].get("warmup_max_lr"))
    return None if peak == "auto" else peak


def _carry_other(found: Imported, key: str, item: Any, change: str) -> None:
    if key in _ANYWAY:
        here, note = _ANYWAY[key]
        found.carry(key, item, {}, note, changed=item != here)
    else:
        found.drop(key, item, f"ds_trainer has no key for it; {change}")
