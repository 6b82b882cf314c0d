"""Settings of `accelerate launch` that contradict the run's JSON. Pure.

accelerate passes its YAML and command line to the processes as variables, in part: outside its DeepSpeed mode it passes
neither accumulation nor clipping. A variable that differs from the run's JSON stops the run, and none of them changes
it. A value that accelerate sends by default cannot be distinguished from the same value set by the user, and is
ignored.

Source: accelerate 1.15, utils/launch.py and commands/launch.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_trainer.config.backend import backend
from ds_trainer.config.keys import value
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.errors import ConfigError

_SAME = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "precision.dtype"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", "batch.accumulation"),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "optimizer.max_grad_norm"),
    "PARALLELISM_CONFIG_TP_SIZE": ("parallelism_config_tp_size", "parallel.tp"),
}
"""Variable -> accelerate's option, and the key that must be equal."""

_SAME_WITH_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", "zero.stage"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer_device", "zero.offload_optimizer.device"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", "zero.offload_param.device"),
}

_SAME_WITH_FSDP = {
    "FSDP_RESHARD_AFTER_FORWARD": ("fsdp_reshard_after_forward", "fsdp.reshard_after_forward"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "fsdp.cpu_offload"),
    "FSDP_AUTO_WRAP_POLICY": ("fsdp_auto_wrap_policy", "fsdp.auto_wrap_policy"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_transformer_layer_cls_to_wrap", "fsdp.transformer_layer_cls_to_wrap"),
    "FSDP_MIN_NUM_PARAMS": ("fsdp_min_num_params", "fsdp.min_num_params"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "model.gradient_checkpointing"),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("parallelism_config_dp_replicate_size", "parallel.dp_replicate"),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("parallelism_config_dp_shard_size", "parallel.dp_shard"),
}

_ACCELERATE_DEFAULTS = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    **{f"PARALLELISM_CONFIG_{axis}_SIZE": "1" for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")},
}
"""Variable -> the value that accelerate sends by default."""

_USUAL_VALUES = {"fsdp.auto_wrap_policy": "transformer_based_wrap"}
"""Key that stays open until the model is read -> its usual value."""

_OURS_ALONE = "ds_trainer has no key for it"
_NO_KEY = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config_file", "give the file as --deepspeed_config FILE"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_moe_layer_cls_names", _OURS_ALONE),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM (distributed_type, --use_megatron_lm)", _OURS_ALONE),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("fsdp_activation_checkpointing_offload", _OURS_ALONE),
    "FSDP_FORWARD_PREFETCH": ("fsdp_forward_prefetch", "set fsdp.prefetch_depth"),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", _OURS_ALONE),
    "PARALLELISM_CONFIG_CP_SIZE": ("parallelism_config_cp_size", _OURS_ALONE),
    "PARALLELISM_CONFIG_SP_SIZE": ("parallelism_config_sp_size", _OURS_ALONE),
}
"""Variable that no key stands for -> accelerate's option, and what to do instead."""

_OFF = ("", "no", "false")
_RULE = "the run's JSON alone says how to train; accelerate's settings agree with it or are left out"


def check_accelerate_launch(environ: Mapping[str, str], resolved: ResolvedConfig) -> list[ConfigError]:
    """Every contradiction between accelerate's variables and what the run will do.

    Args:
        environ: Environment of a rank.
        resolved: The run.
    """
    return [*_modes(environ, resolved), *_compiler(environ, resolved), *_values(environ, resolved)]


def _modes(environ: Mapping[str, str], resolved: ResolvedConfig) -> Iterator[ConfigError]:
    """DeepSpeed, FSDP and other modes that accelerate switches on."""
    config = resolved.config
    key = "accelerate.backend" if config.parallel.engine == "accelerate" else "parallel.engine"
    if _is_on(environ, "ACCELERATE_USE_DEEPSPEED") and backend(config) != "deepspeed":
        option = "DEEPSPEED (distributed_type, --use_deepspeed)"
        yield _error("ACCELERATE_USE_DEEPSPEED=true", resolved, key, "set it to deepspeed", option)
    if _is_on(environ, "ACCELERATE_USE_FSDP"):
        option, version = "FSDP (distributed_type, --use_fsdp)", environ.get("FSDP_VERSION", "1")
        sent = ", ".join(f"{name}={item}" for name, item in sorted(environ.items()) if name.startswith("FSDP_"))
        if backend(config) != "fsdp2":
            yield _error(f"ACCELERATE_USE_FSDP=true ({sent})", resolved, key, "set it to fsdp2", option)
        elif version != "2":
            yield ConfigError(
                f"ACCELERATE_USE_FSDP=true and FSDP_VERSION={version}",
                "FSDP here is FSDP2",
                f"set fsdp_version to 2 (accelerate to-fsdp2 converts a config file); or {_leave_out(option)}",
            )
    for name, (option, instead) in _NO_KEY.items():
        if environ.get(name, "").lower() not in (*_OFF, _ACCELERATE_DEFAULTS.get(name)):
            yield ConfigError(f"{name}={environ[name]}", _RULE, f"{instead}; {_leave_out(option)}")


def _compiler(environ: Mapping[str, str], resolved: ResolvedConfig) -> Iterator[ConfigError]:
    sent = environ.get("ACCELERATE_DYNAMO_BACKEND", "")
    if sent.lower() in _OFF or (sent.lower() == "inductor" and resolved.config.model.compile):
        return
    instead = "set it to true" if sent.lower() == "inductor" else "true compiles with inductor"
    yield _error(f"ACCELERATE_DYNAMO_BACKEND={sent}", resolved, "model.compile", instead, "dynamo_backend")


def _values(environ: Mapping[str, str], resolved: ResolvedConfig) -> Iterator[ConfigError]:
    config, table = resolved.config, dict(_SAME)
    if _is_on(environ, "ACCELERATE_USE_DEEPSPEED") and backend(config) == "deepspeed":
        table |= _SAME_WITH_DEEPSPEED
    if _is_on(environ, "ACCELERATE_USE_FSDP") and (backend(config), environ.get("FSDP_VERSION")) == ("fsdp2", "2"):
        table |= _SAME_WITH_FSDP
    for name, (option, key) in table.items():
        sent = environ.get(name, "auto")
        if sent in ("", "auto", _ACCELERATE_DEFAULTS.get(name)):
            continue
        item = _parsed(name, sent)
        if item not in (value(config, key), _USUAL_VALUES.get(key) if value(config, key) is None else None):
            shown = item if isinstance(item, str) else json.dumps(item)
            yield _error(f"{name}={sent}", resolved, key, f"set it to {shown} too", option)
    if _is_on(environ, "ACCELERATE_USE_CPU") and config.run.device != "cpu":
        yield _error("ACCELERATE_USE_CPU=True", resolved, "run.device", "set it to cpu", "use_cpu")


def _error(sent: str, resolved: ResolvedConfig, key: str, instead: str, option: str) -> ConfigError:
    is_now = f"{key} is {json.dumps(value(resolved.config, key))} ({resolved.reasons[key]})"
    return ConfigError(f"{sent}, and {is_now}", _RULE, f"{key}: {instead}; or {_leave_out(option)}")


def _leave_out(option: str) -> str:
    return f"take {option} out of accelerate's config file and command line"


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("true", "1", "yes")


def _parsed(name: str, text: str) -> Any:
    """A variable's text as the value of its key."""
    if name == "FSDP_AUTO_WRAP_POLICY":
        return text.lower()
    if name == "FSDP_TRANSFORMER_CLS_TO_WRAP":
        return tuple(text.split(","))
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
