"""DeepSpeed's JSON for a resolved config. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ds_trainer.config.deepspeed.native_keys import unified_keys
from ds_trainer.config.deepspeed.stages_of_keys import OFFLOAD_DEVICES, STAGES
from ds_trainer.config.keys import assign, flatten
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.training_sections import OptimizerConfig
from ds_trainer.errors import ConfigError, ConfigErrors

_SHORTEST_WARMUP = 2
_MAY_DIFFER = ("steps_per_print", "wall_clock_breakdown")
"""Keys that we write only to silence DeepSpeed's output: a native value wins."""


def to_deepspeed(resolved: ResolvedConfig, standalone: bool = False) -> dict[str, Any]:
    """The native DeepSpeed config of a run.

    Args:
        resolved: The run.
        standalone: Add the `optimizer` and `scheduler` sections and DeepSpeed's own tensor parallelism, for use outside
            ds_trainer.

    Raises:
        ConfigErrors: `native.deepspeed` contradicts the unified part, or `standalone` asks for a schedule that
            DeepSpeed lacks.
    """
    config = resolved.config
    native: dict[str, Any] = {
        "train_batch_size": config.batch.global_size,
        "train_micro_batch_size_per_gpu": config.batch.micro_size,
        "gradient_accumulation_steps": config.batch.accumulation,
        "gradient_clipping": config.optimizer.max_grad_norm,
        **_precision(config),
        "zero_optimization": _zero(config),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    offload = config.zero.offload_optimizer.device
    if offload != "none":
        native["zero_force_ds_cpu_optimizer"] = resolved.optimizer_implementation == "deepspeed_cpu"
    if "nvme" in (offload, config.zero.offload_param.device):
        native["aio"] = config.zero.aio.model_dump()
    if standalone:
        native |= _optimizer_sections(config)
        if config.parallel.tp > 1:
            native["tensor_parallel"] = {"autotp_size": config.parallel.tp}
    return _merge(native, resolved)


def gathering_on_save(native: dict[str, Any]) -> dict[str, Any]:
    """The native config for trainers that save through DeepSpeed: at stage 3 it gathers weights only by this key."""
    zero = native["zero_optimization"]
    gather = {"stage3_gather_16bit_weights_on_model_save": True} if zero["stage"] == 3 else {}
    return native | {"zero_optimization": zero | gather}


def standalone_notes(config: RunConfig) -> list[str]:
    """Settings that a file for DeepSpeed alone cannot express, one line each."""
    notes = ["loss: DeepSpeed averages over ranks and micro-batches; ds_trainer divides by all label tokens of a step"]
    if config.optimizer.weight_decay and not config.optimizer.decay_norms_and_biases:
        notes.append("optimizer.weight_decay: hand DeepSpeed parameter groups, or it decays norms and biases too")
    if config.schedule.name != "constant" or config.schedule.warmup_steps:
        notes.append("schedule: DeepSpeed's own runs one step behind")
    if config.parallel.tp > 1:
        notes.append(
            "parallel.tp: written as DeepSpeed's AutoTP, which finds the layers itself and shards a model that every "
            "rank has in host memory; parallel.tp_plan and parallel.sequence_parallel are lost"
        )
    if config.parallel.pp > 1:
        notes.append(
            "parallel.pp: there is no key for it; DeepSpeed's own pipeline takes a PipelineModule, a model written as "
            "a list of layers, with num_stages, and runs it as 1f1b"
        )
    return notes


def native_notes(config: RunConfig) -> list[str]:
    """Settings that ds_trainer passes to DeepSpeed by other arguments than its JSON, one line each."""
    notes = []
    if config.parallel.tp > 1:
        notes.append(
            f"parallel.tp {config.parallel.tp}: ds_trainer shards the layers and passes DeepSpeed an mpu, for which "
            "there is no key; for DeepSpeed alone use --standalone"
        )
    if config.parallel.pp > 1:
        notes.append(
            f"parallel.pp {config.parallel.pp}: ds_trainer runs the stages, and DeepSpeed sees those of one rank as a "
            "model, by an mpu, for which there is no key"
        )
    return notes


def _precision(config: RunConfig) -> dict[str, Any]:
    precision = config.precision
    sections: dict[str, Any] = {
        "communication_data_type": precision.communication_data_type,
        "data_types": {"grad_accum_dtype": precision.grad_dtype},
    }
    if precision.dtype == "fp16":
        sections["fp16"] = {"enabled": True, **precision.loss_scale.model_dump()}
    elif precision.dtype == "bf16" and config.zero.stage == 0:
        # Without ZeRO, DeepSpeed has no fp32 master weights for bf16 outside its pipeline: autocast keeps fp32.
        sections["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision.dtype == "bf16":
        # The check makes ZeRO drop a step whose gradient is not finite instead of writing NaN into the master weights.
        sections["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return sections


def _zero(config: RunConfig) -> dict[str, Any]:
    zero = config.zero
    section: dict[str, Any] = {"stage": zero.stage}
    for name, stages in STAGES.items():
        if zero.stage in stages and (item := getattr(zero, name)) is not None:
            section[name] = item
    for name in ("offload_optimizer", "offload_param"):
        part = getattr(zero, name)
        if part.device != "none":
            keys = [key for key in type(part).model_fields if part.device in OFFLOAD_DEVICES.get(f"{name}.{key}", ())]
            values = {key: getattr(part, key) for key in keys}
            section[name] = {"device": part.device} | {key: item for key, item in values.items() if item is not None}
    return section


def _optimizer_sections(config: RunConfig) -> dict[str, Any]:
    optimizer = config.optimizer
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    match optimizer.name:
        case "adamw" | "adam":
            params |= {"betas": list(optimizer.betas), "eps": optimizer.eps, "adam_w_mode": optimizer.name == "adamw"}
        case "lion":
            params |= {"betas": list(optimizer.betas)}
        case "sgd":
            params |= {"momentum": optimizer.momentum}
    names = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "sgd": "SGD"}
    sections: dict[str, Any] = {"optimizer": {"type": names[optimizer.name], "params": params}}
    schedule = config.schedule
    if schedule.name == "constant" and not schedule.warmup_steps and not schedule.warmup_ratio:
        return sections  # Its WarmupLR takes no warm-up of 0.
    return sections | {"scheduler": _scheduler(config, optimizer)}


def _scheduler(config: RunConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    schedule, total = config.schedule, config.run.max_steps
    warmup = schedule.warmup_steps
    if warmup is not None and warmup < _SHORTEST_WARMUP:
        raise ConfigErrors(
            [
                ConfigError(
                    f"schedule.warmup_steps is {warmup} in a file for DeepSpeed alone",
                    f"DeepSpeed's schedules warm up for {_SHORTEST_WARMUP} steps or more",
                    f"set schedule.warmup_steps to {_SHORTEST_WARMUP} or more, schedule.name to constant without "
                    "warm-up, or translate without --standalone",
                )
            ]
        )
    peak = {"warmup_min_lr": 0.0, "warmup_max_lr": optimizer.lr, "warmup_num_steps": warmup, "warmup_type": "linear"}
    if schedule.name == "constant":
        return {"type": "WarmupLR", "params": peak}
    if total is None or schedule.warmup_steps is None:
        raise ConfigErrors(
            [
                ConfigError(
                    "a file for DeepSpeed alone, without run.max_steps or with schedule.warmup_ratio",
                    "DeepSpeed's schedules count in steps",
                    "set run.max_steps and schedule.warmup_steps, or schedule.name to constant",
                )
            ]
        )
    if schedule.name == "cosine":
        ratios = {"cos_min_ratio": schedule.min_lr_ratio, "warmup_min_ratio": 0.0}
        return {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": total, "warmup_num_steps": warmup, "warmup_type": "linear", **ratios},
        }
    if schedule.name == "linear" and not schedule.min_lr_ratio:
        return {"type": "WarmupDecayLR", "params": {"total_num_steps": total, **peak}}
    raise ConfigErrors(
        [
            ConfigError(
                f"schedule.name is {schedule.name!r} with schedule.min_lr_ratio {schedule.min_lr_ratio:g}",
                "DeepSpeed's own schedules are constant, linear to zero, and cosine",
                "set schedule.name to cosine, or translate without --standalone",
            )
        ]
    )


def _merge(native: dict[str, Any], resolved: ResolvedConfig) -> dict[str, Any]:
    """Adds `native.deepspeed` to our keys; refuses a key of ours with another value."""
    written, errors = flatten(native), []
    for key, item in flatten(resolved.config.native.deepspeed).items():
        unified = unified_keys().get(key)
        ours = written.get(key)
        if key in _MAY_DIFFER or (unified is None and key not in written):
            assign(native, key, deepcopy(item))
        elif item != ours and not (ours is None and item in (False, "none")):
            errors.append(_contradiction(key, item, ours, unified, resolved.reasons))
    if errors:
        raise ConfigErrors(errors)
    return native


def _contradiction(key: str, item: Any, ours: Any, unified: str | None, reasons: Mapping[str, str]) -> ConfigError:
    if unified is None:
        return ConfigError(
            f"native.deepspeed.{key} is {json.dumps(item)}", f"ds_trainer needs {json.dumps(ours)}", f"remove {key}"
        )
    says = (
        f"{unified} ({reasons.get(unified, 'default')}) gives {json.dumps(ours)}"
        if ours is not None
        else (f"{unified}, which corresponds to it, is not used in this run")
    )
    return ConfigError(
        f"native.deepspeed.{key} is {json.dumps(item)}, but {says}",
        "a setting that has a unified key is set by that key alone",
        f"set {unified} and remove native.deepspeed.{key}",
    )
