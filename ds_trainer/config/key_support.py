"""What every engine does with every key: nothing is dropped in silence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_trainer.config.deepspeed.stages_of_keys import TUNING

Status = Literal["mapped", "implied", "refused", "no_effect"]


@dataclass(frozen=True)
class KeySupport:
    """What an engine does with a key.

    Args:
        status: `mapped`: handed to the engine. `implied`: done by ds_trainer itself, alike on every engine. `refused`:
            an error when it asks for something. `no_effect`: runs, with a warning when it is set.
        note: One line of explanation.
        already: Values of a refused key that ask for what happens anyway.
    """

    status: Status
    note: str
    already: tuple[str | int, ...] = ()


_OURS = {
    "": KeySupport("implied", "done by ds_trainer, alike on every engine"),
    "$schema": KeySupport("implied", "read by editors"),
    "accelerate": KeySupport("refused", "it says what the accelerate engine runs on"),
}
_ALL_RANKS = "it lays out the data-parallel ranks of fsdp2; this engine takes all of them as one group"
_ONE_GROUP = {
    "parallel.dp_replicate": KeySupport("refused", _ALL_RANKS, (1,)),
    "parallel.dp_shard": KeySupport("refused", _ALL_RANKS),
    "fsdp": KeySupport("refused", "arguments of fully_shard, which belong to the fsdp2 engine"),
}
_GRAD_SCALER = {
    "precision.loss_scale": KeySupport("mapped", "torch.amp.GradScaler"),
    "precision.loss_scale.hysteresis": KeySupport("no_effect", "torch.amp.GradScaler halves at each overflow"),
    "precision.loss_scale.min_loss_scale": KeySupport("no_effect", "torch.amp.GradScaler has no lower end"),
}
_OWN_ENGINES = (
    "the engines deepspeed, fsdp2 and ddp have tensor and pipeline parallelism; accelerate has data parallelism alone"
)
_NO_MODEL_PARALLELISM = {
    "parallel.tp": KeySupport("refused", _OWN_ENGINES, (1,)),
    "parallel.pp": KeySupport("refused", _OWN_ENGINES, (1,)),
    "parallel.schedule": KeySupport("refused", _OWN_ENGINES, ("1f1b",)),
    **{
        f"parallel.{name}": KeySupport("refused", _OWN_ENGINES)
        for name in ("tp_plan", "sequence_parallel", "keep_gathered_input", "virtual_stages", "pp_split")
    },
}
_NO_DEEPSPEED = {"native.deepspeed": KeySupport("refused", "DeepSpeed keys belong to the deepspeed engine")}
_NO_BUCKETS = KeySupport("no_effect", "fsdp2 gathers and reduces block by block, and has no buckets")

_TABLE: dict[str, dict[str, KeySupport]] = {
    "deepspeed": _OURS
    | _ONE_GROUP
    | {
        "parallel.tp": KeySupport("mapped", "the mpu that names the data-parallel ranks, and the batch's factors"),
        "parallel.pp": KeySupport("mapped", "the mpu that names the data-parallel ranks, and the batch's factors"),
        "zero": KeySupport("mapped", "zero_optimization and aio"),
        "precision.dtype": KeySupport("mapped", "bf16, fp16; torch_autocast for bf16 at stage 0"),
        "precision.grad_dtype": KeySupport("mapped", "data_types.grad_accum_dtype"),
        "precision.communication_data_type": KeySupport("mapped", "communication_data_type"),
        "precision.loss_scale": KeySupport("mapped", "fp16"),
        "batch": KeySupport("mapped", "train_batch_size and its factors"),
        "optimizer.max_grad_norm": KeySupport("mapped", "gradient_clipping"),
        "optimizer.norm_type": KeySupport("refused", "DeepSpeed clips by the L2 norm", ("l2",)),
        "native.deepspeed": KeySupport("mapped", "merged last"),
        "ddp": KeySupport("refused", "arguments of DistributedDataParallel, which the deepspeed engine does not use"),
    },
    "fsdp2": _OURS
    | _GRAD_SCALER
    | _NO_DEEPSPEED
    | {
        "parallel.dp_replicate": KeySupport("mapped", "mesh"),
        "parallel.dp_shard": KeySupport("mapped", "mesh"),
        "parallel.tp": KeySupport("mapped", "mesh, whose innermost axis it is"),
        "parallel.pp": KeySupport("mapped", "mesh, whose outermost axis it is"),
        "fsdp.reshard_after_forward": KeySupport("mapped", "reshard_after_forward of fully_shard"),
        "fsdp.cpu_offload": KeySupport("mapped", "CPUOffloadPolicy"),
        "fsdp.pin_memory": KeySupport("mapped", "CPUOffloadPolicy.pin_memory"),
        "fsdp.buffer_dtype": KeySupport("mapped", "buffers are cast when they are loaded"),
        "fsdp.auto_wrap_policy": KeySupport("mapped", "which modules fully_shard is called on"),
        "fsdp.transformer_layer_cls_to_wrap": KeySupport("mapped", "which modules fully_shard is called on"),
        "fsdp.min_num_params": KeySupport("mapped", "which modules fully_shard is called on"),
        "fsdp.prefetch_depth": KeySupport(
            "mapped", "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch"
        ),
        "precision.dtype": KeySupport("mapped", "MixedPrecisionPolicy.param_dtype"),
        "precision.grad_dtype": KeySupport("mapped", "MixedPrecisionPolicy.reduce_dtype, in which it accumulates too"),
        "precision.communication_data_type": KeySupport("mapped", "MixedPrecisionPolicy.reduce_dtype"),
        "zero": KeySupport("refused", "DeepSpeed does this, and fsdp2 has nothing like it"),
        "zero.stage": KeySupport("mapped", "reshard_after_forward: stage 3 is true, stage 2 is false"),
        "zero.zero_hpz_partition_size": KeySupport("mapped", "reshard_after_forward, as a number"),
        "zero.offload_optimizer.device": KeySupport(
            "mapped", "CPUOffloadPolicy, together with zero.offload_param.device"
        ),
        "zero.offload_param.device": KeySupport(
            "mapped", "CPUOffloadPolicy, together with zero.offload_optimizer.device"
        ),
        "zero.offload_optimizer.pin_memory": KeySupport("mapped", "CPUOffloadPolicy.pin_memory"),
        "zero.offload_param.pin_memory": KeySupport("mapped", "CPUOffloadPolicy.pin_memory"),
        **dict.fromkeys((f"zero.{name}" for name in TUNING), _NO_BUCKETS),
        "ddp": KeySupport("refused", "arguments of DistributedDataParallel, which the fsdp2 engine does not use"),
    },
    "ddp": _OURS
    | _ONE_GROUP
    | _GRAD_SCALER
    | _NO_DEEPSPEED
    | {
        "parallel.tp": KeySupport("mapped", "process_group: the data-parallel ranks"),
        "parallel.pp": KeySupport("mapped", "process_group: the data-parallel ranks"),
        "ddp": KeySupport("mapped", "arguments of DistributedDataParallel and its communication hooks"),
        "precision.dtype": KeySupport("mapped", "torch.autocast over fp32 parameters"),
        "precision.grad_dtype": KeySupport("refused", "DDP accumulates in the parameters' dtype", ("fp32",)),
        "precision.communication_data_type": KeySupport(
            "refused", "on DDP gradients are compressed by ddp.comm_hook", ("fp32",)
        ),
        "zero": KeySupport("refused", "ZeRO belongs to the deepspeed engine"),
    },
}
_ACCELERATE = _NO_MODEL_PARALLELISM | {"accelerate": KeySupport("mapped", "which plugin is made")}
_TABLE |= {
    "accelerate+deepspeed": _TABLE["deepspeed"] | _ACCELERATE,
    "accelerate+fsdp2": _TABLE["fsdp2"]
    | _ACCELERATE
    | {"fsdp.prefetch_depth": KeySupport("refused", "accelerate's FSDP plugin has no prefetch depth")},
    "accelerate+ddp": _TABLE["ddp"] | _ACCELERATE,
}


def known_engines() -> tuple[str, ...]:
    """The table's columns, as `ds_trainer.config.backend.engine_column` names them; a plug-in has none."""
    return tuple(_TABLE)


def key_support(key: str, engine: str) -> KeySupport:
    """What an engine does with a dotted leaf key: the entry of its longest prefix.

    Raises:
        KeyError: The engine is not in the table.
    """
    table = _TABLE[engine]
    parts = key.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next(table[prefix] for prefix in prefixes if prefix in table)
