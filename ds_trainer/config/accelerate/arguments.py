"""accelerate's YAML and the arguments of its plugins for a run. Pure.

Source: accelerate 1.15, commands/config/config_args.py, utils/dataclasses.py and utils/launch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.torch.arguments import ddp_arguments, fsdp2_arguments

_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class AccelerateArguments:
    """Arguments of `Accelerator` and its plugins, as plain data; dtypes by their names in the config.

    Args:
        accelerator: Arguments of `Accelerator` that are no objects.
        deepspeed: Arguments of `DeepSpeedPlugin`; None on another backend, and so on.
        fsdp: Arguments of `FullyShardedDataParallelPlugin` but its two policies, which are those of `fsdp2_arguments`.
        parallelism: Arguments of `ParallelismConfig`; None: one group of all ranks.
        ddp: Arguments of `DistributedDataParallelKwargs`.
        scaler: Arguments of `GradScalerKwargs`, fp16's loss scale.
    """

    accelerator: dict[str, Any]
    deepspeed: dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = None
    parallelism: dict[str, int] | None = None
    ddp: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None


def accelerate_arguments(resolved: ResolvedConfig) -> AccelerateArguments:
    """The arguments of `Accelerator` and its plugins for a run of any engine."""
    config, on = resolved.config, backend(resolved.config)
    assert config.precision.dtype is not None and config.batch.accumulation is not None
    accelerator: dict[str, Any] = {
        # DeepSpeed's JSON has a section for it, and at stage 0 another one than accelerate would add.
        "mixed_precision": "no" if on == "deepspeed" else _MIXED_PRECISION[config.precision.dtype],
        "gradient_accumulation_steps": config.batch.accumulation,
    }
    if on == "deepspeed":
        plugin = {"hf_ds_config": to_deepspeed(resolved), "zero3_init_flag": config.zero.stage == 3}
        return AccelerateArguments(accelerator, deepspeed=plugin)
    scaler = _scaler(config) if config.precision.dtype == "fp16" else None
    if on == "fsdp2":
        sizes = {f"{axis}_size": size for axis, size in fsdp2_arguments(resolved).mesh.items()}
        parallelism = sizes if len(sizes) > 1 else None
        return AccelerateArguments(accelerator, fsdp=_fsdp(config), parallelism=parallelism, scaler=scaler)
    if config.run.device == "cpu":
        accelerator["cpu"] = True
    return AccelerateArguments(accelerator, ddp=ddp_arguments(resolved) | _comm_hook(config), scaler=scaler)


def _fsdp(config: RunConfig) -> dict[str, Any]:
    fsdp = config.fsdp
    plugin: dict[str, Any] = {
        "fsdp_version": 2,
        "reshard_after_forward": bool(fsdp.reshard_after_forward),
        # Where no classes are named, accelerate takes the model's `_no_split_modules`, as we do.
        "auto_wrap_policy": fsdp.auto_wrap_policy or "transformer_based_wrap",
        # It would broadcast full tensors from rank 0: ds_trainer's ranks read their own slices.
        "cpu_ram_efficient_loading": False,
    }
    if fsdp.transformer_layer_cls_to_wrap is not None:
        plugin["transformer_cls_names_to_wrap"] = list(fsdp.transformer_layer_cls_to_wrap)
    if fsdp.auto_wrap_policy == "size_based_wrap":
        plugin["min_num_params"] = fsdp.min_num_params or 10**8
    return plugin


def _comm_hook(config: RunConfig) -> dict[str, Any]:
    match config.ddp.comm_hook:
        case None:
            return {}
        case "powersgd":
            option = {"matrix_approximation_rank": config.ddp.powersgd_rank, "start_powerSGD_iter": 2}
            return {"comm_hook": "power_sgd", "comm_state_option": option}
        case name:
            return {"comm_hook": name}


def _scaler(config: RunConfig) -> dict[str, Any]:
    scale = config.precision.loss_scale
    return {"init_scale": 2.0**scale.initial_scale_power, "growth_interval": scale.loss_scale_window}


def to_accelerate_yaml(resolved: ResolvedConfig) -> dict[str, Any]:
    """The content of accelerate's config file, as `accelerate config` writes it."""
    config, on = resolved.config, backend(resolved.config)
    assert config.precision.dtype is not None
    on_cpu = config.run.device == "cpu"
    kinds = {"deepspeed": "DEEPSPEED", "fsdp2": "FSDP"}
    one = "NO" if resolved.machine.world == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    file: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kinds.get(on, one),
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _MIXED_PRECISION[config.precision.dtype],
        "num_machines": 1,
        "num_processes": resolved.machine.world,
        "rdzv_backend": "static",
        "same_network": True,
        # With use_cpu accelerate ignores its DeepSpeed and FSDP plugins.
        "use_cpu": on_cpu and on not in kinds,
    }
    if on == "deepspeed":
        file["deepspeed_config"] = _deepspeed_section(config)
    elif on == "fsdp2":
        file["fsdp_config"] = _fsdp_section(config)
        if config.parallel.dp_replicate > 1:
            sizes = {"dp_replicate": config.parallel.dp_replicate, "dp_shard": config.parallel.dp_shard}
            sizes |= {"tp": 1, "cp": 1}
            file["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if config.model.compile:
        file["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return file


def _deepspeed_section(config: RunConfig) -> dict[str, Any]:
    zero = config.zero
    return {
        "gradient_accumulation_steps": config.batch.accumulation,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "offload_optimizer_device": zero.offload_optimizer.device,
        "offload_param_device": zero.offload_param.device,
        "zero3_init_flag": zero.stage == 3,
        "zero3_save_16bit_model": zero.stage == 3,
        "zero_stage": zero.stage,
    }


def _fsdp_section(config: RunConfig) -> dict[str, Any]:
    plugin = _fsdp(config)
    section = {
        "fsdp_activation_checkpointing": bool(config.model.gradient_checkpointing),
        "fsdp_auto_wrap_policy": plugin["auto_wrap_policy"].upper(),
        # A script's from_pretrained then loads on one rank of each machine, not all weights on every rank.
        # FSDP2 broadcasts them by itself: fsdp_sync_module_states is FSDP1's.
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": config.fsdp.cpu_offload,
        "fsdp_reshard_after_forward": plugin["reshard_after_forward"],
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": plugin["fsdp_version"],
    }
    if "transformer_cls_names_to_wrap" in plugin:
        section["fsdp_transformer_layer_cls_to_wrap"] = ",".join(plugin["transformer_cls_names_to_wrap"])
    if "min_num_params" in plugin:
        section["fsdp_min_num_params"] = plugin["min_num_params"]
    return section
