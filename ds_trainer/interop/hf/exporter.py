"""The arguments with which transformers' `Trainer`, and TRL's, trains as a run of ours does. Pure.

Its loss is ours: with `average_tokens_across_devices`, its default, token losses are summed and divided by the label
tokens of all micro-batches and ranks. So are its schedules; it calls a linear one that ends above zero polynomial.

Source: transformers 5.24, trainer.py, trainer_optimizer.py and optimization.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.arguments import gathering_on_save, to_deepspeed
from ds_trainer.config.keys import value
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.interop.hf.fields import KEY_OF_FIELD
from ds_trainer.interop.hf.notes import UNTRANSLATED, hf_notes

_NOT_YET = ("activation_checkpointing",)
"""Names that transformers 5.17 does not know; 5.24 knows the older one too."""

_ENGINE = "parallel.engine"
_FOR_GPUS = "translate for GPUs: run.device cuda (--device cuda)"

_OPTIMIZERS = {"adam": "adamw_torch", "lion": "lion_32bit", "sgd": "sgd", "adafactor": "adafactor"}


@dataclass(frozen=True)
class HFArguments:
    """The arguments of transformers' `Trainer` for a run.

    Args:
        arguments: `TrainingArguments(**arguments, deepspeed=deepspeed)`; JSON.
        deepspeed: The DeepSpeed JSON; None where DeepSpeed does not run.
        notes: Settings that it lacks or handles differently; one line each.
    """

    arguments: dict[str, Any]
    deepspeed: dict[str, Any] | None
    notes: tuple[str, ...]


def to_hf(resolved: ResolvedConfig) -> HFArguments:
    """Translates a run, for as many ranks as it is resolved for.

    Every value is written, defaults too: classes such as TRL's `SFTConfig` have defaults of their own.

    Raises:
        ConfigErrors: Its engine, its schedule or its tensor parallelism is one that transformers' Trainer does not
            have, on this device.
    """
    config, engine = resolved.config, backend(resolved.config)
    if engine not in ("deepspeed", "fsdp2", "ddp"):
        raise _no_such(f"parallel.engine is {engine!r}", "it runs on deepspeed, fsdp2 and ddp", "set one of them")
    for axis in ("tp", "pp"):
        key, size = f"parallel.{axis}", getattr(config.parallel, axis)
        if size > 1:
            raise _no_such(f"{key} is {size}", UNTRANSLATED[key], f"set {key} to 1")
    if config.run.device == "cpu" and engine == "fsdp2":
        rule = "accelerate, which it calls, runs FSDP2 on GPUs only"
        found = f"FSDP2 on a CPU ({_ENGINE} {config.parallel.engine}, run.device cpu)"
        raise _no_such(found, rule, f"set {_ENGINE} to ddp, or {_FOR_GPUS}")
    arguments = {name: value(config, key) for name, key in KEY_OF_FIELD.items() if _is_written(name, engine)}
    arguments |= _length(config) | _schedule(config) | _optimizer(config) | _data(config)
    arguments |= _evaluation_and_saving(config) | _logging(config)
    arguments |= {
        "bf16": config.precision.dtype == "bf16",
        "fp16": config.precision.dtype == "fp16",
        "gradient_checkpointing": bool(config.model.gradient_checkpointing),
        "torch_compile": config.model.compile,
        "ddp_timeout": math.ceil(config.run.collective_timeout_s),
        # With it, settings of DeepSpeed or FSDP are silently ignored, and DDP runs.
        "use_cpu": config.run.device == "cpu" and engine == "ddp",
    }
    deepspeed = None
    if engine == "deepspeed":
        deepspeed = gathering_on_save(to_deepspeed(resolved))
        arguments["bf16"] = "bf16" in deepspeed  # At stage 0 it is DeepSpeed's own autocast.
        if arguments["bf16"] and config.run.device == "cpu":
            found = "precision.dtype is bf16, on a CPU with DeepSpeed"
            rule = "it takes bf16 on a CPU with use_cpu=True only, which turns DeepSpeed off"
            change = f"set precision.dtype to fp32 or {_ENGINE} to ddp, or {_FOR_GPUS}"
            raise _no_such(found, rule, change)
    elif engine == "fsdp2":
        arguments |= _fsdp(config)
    given = {name: item for name, item in arguments.items() if item is not None}
    return HFArguments(given, deepspeed, hf_notes(config))


def _is_written(name: str, engine: str) -> bool:
    return name not in _NOT_YET and (engine == "ddp" or not KEY_OF_FIELD[name].startswith("ddp."))


def _no_such(found: str, rule: str, change: str) -> ConfigErrors:
    return ConfigErrors([ConfigError(f"{found}, for transformers' Trainer", rule, change)])


def _length(config: RunConfig) -> dict[str, Any]:
    run = config.run
    return {"max_steps": run.max_steps} if run.max_steps is not None else {"num_train_epochs": float(run.epochs or 1)}


def _schedule(config: RunConfig) -> dict[str, Any]:
    schedule, floor = config.schedule, config.schedule.min_lr_ratio
    warmup = schedule.warmup_ratio if schedule.warmup_steps is None else schedule.warmup_steps
    if warmup == schedule.warmup_ratio == 1.0:
        raise _no_such("schedule.warmup_ratio is 1", "it takes 1 for one step", "set schedule.warmup_steps")
    name, options = str(schedule.name), {}
    if name == "constant" or (name != "wsd" and floor == 1.0):
        name = "constant_with_warmup" if warmup else "constant"
    elif name == "linear" and floor:
        name, options = "polynomial", {"lr_end": config.optimizer.lr * floor, "power": 1.0}
    elif name == "cosine" and floor:
        name, options = "cosine_with_min_lr", {"min_lr_rate": floor}
    elif name == "wsd":
        name, options = "warmup_stable_decay", _wsd(config)
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": options or None, "warmup_steps": warmup or 0}


def _wsd(config: RunConfig) -> dict[str, Any]:
    schedule, total = config.schedule, config.run.max_steps
    if total is None:
        raise _no_such(
            "schedule.name is 'wsd' without run.max_steps", "its decay is given in steps", "set run.max_steps"
        )
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.ceil((schedule.warmup_ratio or 0.0) * total)
    steps = min(math.ceil(schedule.decay_ratio * total), max(0, total - warmup))
    return {"num_decay_steps": steps, "decay_type": "linear", "min_lr_ratio": schedule.min_lr_ratio}


def _optimizer(config: RunConfig) -> dict[str, Any]:
    optimizer = config.optimizer
    arguments: dict[str, Any] = {}
    if optimizer.name in ("adamw", "adam", "lion"):
        arguments = dict(zip(("adam_beta1", "adam_beta2"), optimizer.betas, strict=True))
    if optimizer.name in ("adamw", "adam"):
        arguments |= {"adam_epsilon": optimizer.eps, "optim": f"adamw_torch{'_fused' if optimizer.fused else ''}"}
    else:
        arguments["optim"] = _OPTIMIZERS[optimizer.name]
    if optimizer.momentum:
        arguments["optim_args"] = f"momentum={optimizer.momentum}"
    return arguments


def _data(config: RunConfig) -> dict[str, Any]:
    data = config.data
    arguments: dict[str, Any] = {"dataloader_pin_memory": bool(data.pin_memory)}
    arguments["dataloader_prefetch_factor"] = data.prefetch_factor if data.num_workers else None
    if not data.shuffle:
        arguments["train_sampling_strategy"] = "sequential"
    return arguments


def _evaluation_and_saving(config: RunConfig) -> dict[str, Any]:
    evaluation, checkpoint = config.evaluation, config.checkpoint
    every = evaluation.every_steps
    best = checkpoint.load_best_model_at_end and every is not None
    saves = "steps" if checkpoint.every_steps else "no"
    if best and every is not None and (checkpoint.every_steps or 1) % every:
        saves = "best"  # At other steps than those of evaluations, transformers refuses to find the best one.
    return {
        "eval_strategy": "steps" if every else "no",
        "save_strategy": saves,
        "save_steps": checkpoint.every_steps or None,
        "save_total_limit": checkpoint.keep_last + best,  # There the best one counts.
        "load_best_model_at_end": best,
        "resume_from_checkpoint": None,
    }


def _logging(config: RunConfig) -> dict[str, Any]:
    logging = config.logging
    return {"report_to": list(logging.report_to) or "none", "disable_tqdm": not logging.progress_bar}


def _fsdp(config: RunConfig) -> dict[str, Any]:
    fsdp = config.fsdp
    options: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": bool(fsdp.reshard_after_forward),
        "cpu_offload": fsdp.cpu_offload,
        "activation_checkpointing": bool(config.model.gradient_checkpointing),
        "auto_wrap_policy": (fsdp.auto_wrap_policy or "transformer_based_wrap").upper(),
        "min_num_params": fsdp.min_num_params,
    }
    if fsdp.transformer_layer_cls_to_wrap is not None:
        options["transformer_layer_cls_to_wrap"] = list(fsdp.transformer_layer_cls_to_wrap)
    options = {name: item for name, item in options.items() if item is not None}
    # Recomputed by FSDP's own hooks: the argument of that name would gather parameters twice.
    return {"fsdp": True, "fsdp_config": options, "gradient_checkpointing": False}


def hf_snippet(resolved: ResolvedConfig) -> str:
    """A Python file with `arguments` and `make_trainer(...)`, which takes what transformers' `Trainer` takes besides.

    Raises:
        ConfigErrors: As `to_hf`.
    """
    config, hf = resolved.config, to_hf(resolved)
    model, evaluation = config.model, config.evaluation
    arguments = hf.arguments | ({"deepspeed": hf.deepspeed} if hf.deepspeed is not None else {})
    options: dict[str, Any] = {"revision": model.revision, "attn_implementation": model.attn_implementation}
    options["trust_remote_code"] = model.trust_remote_code or None
    loads = "".join(f", {name}={item!r}" for name, item in options.items() if item is not None)
    stops = evaluation.early_stopping_patience
    patience = f"early_stopping_patience={stops}, early_stopping_threshold={evaluation.early_stopping_threshold}"
    lines = [
        "import torch",
        f"from transformers import {model.auto_class}, EarlyStoppingCallback, Trainer, TrainingArguments",
        "",
        *(f"# {note}" for note in hf.notes),
        "arguments = TrainingArguments(",
        *(f"    {name}={item!r}," for name, item in arguments.items()),
        ")",
        "",
        "",
        "def make_trainer(**given):",
        f"    model = {model.auto_class}.from_pretrained({model.path!r}, dtype=torch.float32{loads})",
        *([f"    callbacks = [EarlyStoppingCallback({patience})]"] if stops else ["    callbacks = []"]),
        "    return Trainer(model=model, args=arguments, callbacks=callbacks, **given)",
    ]
    return "\n".join(lines) + "\n"
