"""What `accelerate launch` was told about training, held against the run's JSON. Pure.

It hands its YAML and command line to the processes as variables, in part: outside its DeepSpeed mode it passes on
neither accumulation nor clipping. What does arrive and differs stops the run; nothing of it is obeyed.

Source: accelerate 1.15, utils/launch.py and commands/launch.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_trainer.config.keys import value
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.errors import ConfigError

_SAME = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "precision.dtype"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", "batch.accumulation"),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "optimizer.max_grad_norm"),
}
"""Variable -> accelerate's option, and the key that must be equal."""

_SAME_WITH_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", "zero.stage"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer_device", "zero.offload_optimizer.device"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", "zero.offload_param.device"),
}

_UNSAID = {"ACCELERATE_MIXED_PRECISION": "no"}
"""What accelerate sends where nobody said anything."""

_NO_KEY = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config_file", "give the file as --deepspeed_config FILE"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_moe_layer_cls_names", "ds_trainer has no key for it"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "ds_trainer has no key for it"),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM (distributed_type, --use_megatron_lm)", "ds_trainer has no key for it"),
}
"""Variable that no key stands for -> accelerate's option, and what to do instead."""

_RULE = "the run's JSON alone says how to train; what accelerate was told agrees with it or is left out"


def check_launched(environ: Mapping[str, str], resolved: ResolvedConfig) -> list[ConfigError]:
    """Every contradiction between accelerate's variables and what the run will do.

    Args:
        environ: Environment of a rank.
        resolved: The run.
    """
    return [*_modes(environ, resolved), *_values(environ, resolved)]


def _modes(environ: Mapping[str, str], resolved: ResolvedConfig) -> Iterator[ConfigError]:
    """The ways of training that accelerate switches on as a whole."""
    engine = resolved.config.parallel.engine
    if _is_on(environ, "ACCELERATE_USE_DEEPSPEED") and engine != "deepspeed":
        option, instead = "DEEPSPEED (distributed_type, --use_deepspeed)", "set it to deepspeed"
        yield _error("ACCELERATE_USE_DEEPSPEED=true", resolved, "parallel.engine", instead, option)
    if _is_on(environ, "ACCELERATE_USE_FSDP"):
        told = ", ".join(f"{name}={item}" for name, item in sorted(environ.items()) if name.startswith("FSDP_"))
        option, instead = "FSDP (distributed_type, --use_fsdp)", "deepspeed with zero.stage 3 shards as much"
        yield _error(f"ACCELERATE_USE_FSDP=true ({told})", resolved, "parallel.engine", instead, option)
    for name, (option, instead) in _NO_KEY.items():
        if environ.get(name, "").lower() not in ("", "no", "false"):
            yield ConfigError(f"{name}={environ[name]}", _RULE, f"{instead}; {_leave_out(option)}")


def _values(environ: Mapping[str, str], resolved: ResolvedConfig) -> Iterator[ConfigError]:
    table = dict(_SAME)
    if _is_on(environ, "ACCELERATE_USE_DEEPSPEED") and resolved.config.parallel.engine == "deepspeed":
        table |= _SAME_WITH_DEEPSPEED
    for name, (option, key) in table.items():
        told = environ.get(name, "auto")
        if told not in ("", "auto", _UNSAID.get(name)) and _parsed(told) != value(resolved.config, key):
            yield _error(f"{name}={told}", resolved, key, f"set it to {told} too", option)
    if _is_on(environ, "ACCELERATE_USE_CPU") and resolved.config.run.device != "cpu":
        yield _error("ACCELERATE_USE_CPU=True", resolved, "run.device", "set it to cpu", "use_cpu")


def _error(told: str, resolved: ResolvedConfig, key: str, instead: str, option: str) -> ConfigError:
    is_now = f"{key} is {json.dumps(value(resolved.config, key))} ({resolved.reasons[key]})"
    return ConfigError(f"{told}, and {is_now}", _RULE, f"{key}: {instead}; or {_leave_out(option)}")


def _leave_out(option: str) -> str:
    return f"take {option} out of accelerate's config file and command line"


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("true", "1", "yes")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
