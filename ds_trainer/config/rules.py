"""Checks across keys: combinations that an engine lacks, would silently change, or would ignore. Pure.

Each rule yields one error per fault; all rules run, and their errors are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points

from ds_trainer.config.backend import backend, engine_column
from ds_trainer.config.deepspeed.native_keys import check_native
from ds_trainer.config.deepspeed.rules import check_zero, check_zero_machine
from ds_trainer.config.key_support import key_support, known_engines
from ds_trainer.config.keys import leaf_fields, value
from ds_trainer.config.pp_rules import check_pipeline
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.rank_rules import check_ranks
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.torch.fsdp_rules import check_fsdp, check_fsdp_machine
from ds_trainer.config.tp_rules import check_tensor
from ds_trainer.errors import ConfigError

FUSED = ("adamw", "adam", "sgd")
"""Optimizers of which torch has a fused kernel."""


def has_fused_kernel(config: RunConfig) -> bool:
    """Whether the optimizer can run in one kernel; torch's fused SGD does not run on FSDP2's shards."""
    name = config.optimizer.name
    return name in FUSED and not (name == "sgd" and backend(config) == "fsdp2")


def check_config(config: RunConfig, origins: Mapping[str, str]) -> list[ConfigError]:
    """Every fault that shows without knowing machine and model."""
    given = Provenance(config, origins)
    return [error for rule in _RULES for error in rule(config, given)]


def check_device_and_ranks(config: RunConfig, origins: Mapping[str, str], machine: Machine) -> list[ConfigError]:
    """Every fault that shows once the kind of device and the number of ranks are known."""
    given = Provenance(config, origins)
    found = [error for rule in _MACHINE_RULES for error in rule(config, given, machine)]
    model_ranks = config.parallel.tp * config.parallel.pp
    if machine.world % model_ranks == 0:  # Else the number of data-parallel ranks is not known.
        of_data = machine.data_parallel_view(model_ranks)
        found += [error for rule in _DATA_RANK_RULES for error in rule(config, given, of_data)]
    return found


def no_effect_warnings(config: RunConfig, origins: Mapping[str, str]) -> list[str]:
    """One line for every key that was set and that the engine cannot act on."""
    engine, given = engine_column(config), Provenance(config, origins)
    if engine not in known_engines():
        return []
    found = {key: key_support(key, engine) for key in leaf_fields() if given.is_set(key)}
    return [f"{key} has no effect: {entry.note}" for key, entry in found.items() if entry.status == "no_effect"]


def _engine_name(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    known = {column.partition("+")[0] for column in known_engines()}
    if config.parallel.engine not in known:  # Metadata of all installed packages is read for plug-ins only.
        known |= {point.name for point in entry_points(group="ds_trainer.engines")}
    if config.parallel.engine not in known:
        yield ConfigError(
            given.describe("parallel.engine"),
            "an engine is built in or installed under the entry-point group ds_trainer.engines",
            f"set parallel.engine to one of {', '.join(sorted(known))}",
        )


def _refused_by_engine(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    engine = engine_column(config)
    if engine not in known_engines():
        return
    for key in leaf_fields():
        entry = key_support(key, engine)
        if entry.status == "refused" and given.is_set(key) and value(config, key) not in entry.already:
            yield ConfigError(
                f"{given.describe(key)} with parallel.engine {_engine_in_words(config)}",
                entry.note,
                f"remove {key} or change {_chooses_engine(config, key)}",
            )


def _engine_in_words(config: RunConfig) -> str:
    over = f" over {config.accelerate.backend}" if config.parallel.engine == "accelerate" else ""
    return f"{config.parallel.engine!r}{over}"


def _chooses_engine(config: RunConfig, key: str) -> str:
    """The key to change: accelerate's backend, unless accelerate refuses whatever it runs on."""
    others = [column for column in known_engines() if column.startswith("accelerate+")]
    is_refused = all(key_support(key, column).status == "refused" for column in others)
    return "accelerate.backend" if config.parallel.engine == "accelerate" and not is_refused else "parallel.engine"


def _zero(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if backend(config) == "deepspeed":
        yield from check_zero(config, given)


def _zero_plus_plus(config: RunConfig, given: Provenance, machine: Machine) -> Iterator[ConfigError]:
    if backend(config) == "deepspeed":
        yield from check_zero_machine(config, given, machine)


def _precision(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    dtype, grad_dtype = config.precision.dtype, config.precision.grad_dtype
    on_deepspeed, stage = backend(config) == "deepspeed", config.zero.stage
    if grad_dtype not in (None, "fp32", dtype):
        yield ConfigError(
            f"{given.describe('precision.grad_dtype')} and {given.describe('precision.dtype')}",
            "gradients are accumulated in fp32 or in the dtype of the backward pass",
            "set precision.grad_dtype to fp32, or precision.dtype to the same dtype",
        )
    elif on_deepspeed and stage == 0 and dtype == "bf16" and grad_dtype == "bf16":
        yield ConfigError(
            f"{given.describe('precision.grad_dtype')} and {given.describe('zero.stage')}",
            "at stage 0 bf16 runs through torch.autocast over fp32 parameters, whose gradients are fp32",
            "set precision.grad_dtype to fp32 or zero.stage to 1",
        )
    elif on_deepspeed and stage == 0 and dtype == "fp16" and grad_dtype == "fp32":
        yield ConfigError(
            f"{given.describe('precision.grad_dtype')}, {given.describe('precision.dtype')} and "
            f"{given.describe('zero.stage')}",
            "DeepSpeed's fp16 at stage 0 accumulates gradients in fp16",
            "set precision.grad_dtype to fp16, zero.stage to 1, or precision.dtype to bf16",
        )
    for name in type(config.precision.loss_scale).model_fields:
        key = f"precision.loss_scale.{name}"
        if dtype != "fp16" and given.is_set(key):
            yield ConfigError(
                f"{given.describe(key)} and {given.describe('precision.dtype')}",
                "the loss is scaled with fp16 only",
                "remove precision.loss_scale or set precision.dtype to fp16",
            )


def _optimizer(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    name = config.optimizer.name
    if name == "adafactor" and backend(config) in ("deepspeed", "fsdp2"):
        yield ConfigError(
            f"{given.describe('optimizer.name')} and {given.describe('parallel.engine')}",
            "adafactor looks at whole matrices, and "
            f"{'ZeRO' if backend(config) == 'deepspeed' else 'FSDP2'} shards them",
            "set parallel.engine to ddp or optimizer.name to adamw",
        )
    yield from _fused(config, given)
    users = {"betas": ("adamw", "adam", "lion"), "eps": ("adamw", "adam"), "momentum": ("sgd",)}
    for part, names in users.items():
        if name not in names and given.is_set(f"optimizer.{part}"):
            yield ConfigError(
                f"{given.describe(f'optimizer.{part}')} and {given.describe('optimizer.name')}",
                f"optimizer.{part} is used by {', '.join(names)} only",
                f"remove optimizer.{part} or set optimizer.name to {names[0]}",
            )
    if not all(0.0 <= beta < 1.0 for beta in config.optimizer.betas):
        yield ConfigError(
            given.describe("optimizer.betas"),
            "each beta is at least 0 and below 1",
            "set optimizer.betas to [0.9, 0.999]",
        )


def _fused(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if not config.optimizer.fused:
        return
    if config.optimizer.name not in FUSED:
        yield ConfigError(
            f"{given.describe('optimizer.fused')} and {given.describe('optimizer.name')}",
            f"torch has fused kernels of {', '.join(FUSED)}",
            f"remove optimizer.fused or set optimizer.name to {FUSED[0]}",
        )
    elif not has_fused_kernel(config):
        yield ConfigError(
            f"{given.describe('optimizer.fused')} and {given.describe('optimizer.name')} on fsdp2",
            "torch's fused SGD does not run on FSDP2's shards",
            f"remove optimizer.fused or set optimizer.name to {FUSED[0]}",
        )
    if backend(config) == "deepspeed" and config.zero.offload_optimizer.device != "none":
        yield ConfigError(
            f"{given.describe('optimizer.fused')} and {given.describe('zero.offload_optimizer.device')}",
            "offloaded states are updated by DeepSpeed's own CPU optimizer",
            "remove optimizer.fused",
        )


def _schedule(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    schedule, max_steps = config.schedule, config.run.max_steps
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        yield ConfigError(
            f"{given.describe('schedule.warmup_steps')} and {given.describe('schedule.warmup_ratio')}",
            "the warm-up has one length",
            "remove one of the two",
        )
    if max_steps is not None and (schedule.warmup_steps or 0) > max_steps:
        yield ConfigError(
            f"{given.describe('schedule.warmup_steps')} and {given.describe('run.max_steps')}",
            "the warm-up ends before the run does",
            f"set schedule.warmup_steps to {max_steps} or less",
        )
    if schedule.name == "wsd" and (schedule.warmup_ratio or 0.0) + schedule.decay_ratio > 1.0:
        yield ConfigError(
            f"{given.describe('schedule.warmup_ratio')} and {given.describe('schedule.decay_ratio')}",
            "warm-up and decay together are at most the whole run",
            f"set schedule.decay_ratio to {1.0 - (schedule.warmup_ratio or 0.0):g} or less",
        )
    users = {"decay_ratio": ("wsd",), "min_lr_ratio": ("linear", "cosine", "wsd")}
    for part, names in users.items():
        if schedule.name not in names and given.is_set(f"schedule.{part}"):
            yield ConfigError(
                f"{given.describe(f'schedule.{part}')} and {given.describe('schedule.name')}",
                f"schedule.{part} is used by {', '.join(names)} only",
                f"remove schedule.{part} or set schedule.name to {names[0]}",
            )


def _embeddings(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if config.model.pad_embeddings_to_multiple_of is not None and not config.model.resize_embeddings:
        yield ConfigError(
            f"{given.describe('model.pad_embeddings_to_multiple_of')} and {given.describe('model.resize_embeddings')}",
            "embeddings are padded when they are resized",
            "set model.resize_embeddings to true",
        )


def _power_sgd(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if backend(config) == "ddp" and config.ddp.comm_hook != "powersgd" and given.is_set("ddp.powersgd_rank"):
        yield ConfigError(
            f"{given.describe('ddp.powersgd_rank')} and {given.describe('ddp.comm_hook')}",
            "the rank is used by powersgd only",
            'remove ddp.powersgd_rank or set ddp.comm_hook to "powersgd"',
        )


def _generation(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if given.is_set("evaluation.max_new_tokens") and not config.evaluation.generate_samples:
        yield ConfigError(
            f"{given.describe('evaluation.max_new_tokens')} and {given.describe('evaluation.generate_samples')}",
            "it bounds the continuations of generate_samples",
            "set evaluation.generate_samples or remove evaluation.max_new_tokens",
        )


def _shard_size(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if not re.fullmatch(r"0*[1-9]\d*[KMG]i?B", config.checkpoint.max_shard_size):
        yield ConfigError(
            given.describe("checkpoint.max_shard_size"),
            "a size is a whole number and KB, MB or GB (powers of 1000) or KiB, MiB or GiB (powers of 1024)",
            'write for example "5GB"',
        )


def _best_model(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    evaluation = config.evaluation
    if given.is_set("evaluation.greater_is_better") and evaluation.metric_for_best_model is None:
        yield ConfigError(
            f"{given.describe('evaluation.greater_is_better')}, and evaluation.metric_for_best_model is not set",
            "it says whether a larger or a smaller metric is better",
            "set evaluation.metric_for_best_model or remove evaluation.greater_is_better",
        )
    if given.is_set("evaluation.early_stopping_threshold") and evaluation.early_stopping_patience is None:
        yield ConfigError(
            f"{given.describe('evaluation.early_stopping_threshold')}, and evaluation.early_stopping_patience is not "
            "set",
            "the threshold is used by early stopping only",
            "set evaluation.early_stopping_patience or remove evaluation.early_stopping_threshold",
        )
    needs_evaluation = (
        "evaluation.metric_for_best_model",
        "evaluation.early_stopping_patience",
        "checkpoint.load_best_model_at_end",
    )
    for key in needs_evaluation:
        if given.is_set(key) and not (evaluation.every_steps or evaluation.at_end):
            yield ConfigError(
                f"{given.describe(key)}, and no evaluation is due",
                "the best model is found among the evaluations",
                f"set evaluation.every_steps or remove {key}",
            )


def _resume(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if config.checkpoint.resume is not None:
        return
    for key in ("checkpoint.resume_weights_only", "checkpoint.allow_global_size_change"):
        if given.is_set(key) and value(config, key):
            yield ConfigError(
                f"{given.describe(key)}, and checkpoint.resume is not set",
                f"{key.rpartition('.')[2]} says how a checkpoint is resumed",
                "set checkpoint.resume to auto or to a checkpoint's folder",
            )


def _native(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    yield from check_native(config.native.deepspeed)


def _fp16_device(config: RunConfig, given: Provenance, machine: Machine) -> Iterator[ConfigError]:
    if config.precision.dtype == "fp16" and machine.device == "cpu":
        yield ConfigError(
            f"{given.describe('precision.dtype')} on cpu",
            "fp16 needs a device that computes in it; a CPU does not, and DeepSpeed refuses it there",
            "set precision.dtype to bf16 or fp32",
        )


def _bf16_hook_device(config: RunConfig, given: Provenance, machine: Machine) -> Iterator[ConfigError]:
    if backend(config) == "ddp" and config.ddp.comm_hook == "bf16" and machine.device == "cpu":
        yield ConfigError(
            f"{given.describe('ddp.comm_hook')} on cpu",
            "torch's bf16 hook reduces through NCCL, which a CPU does not have",
            "set ddp.comm_hook to fp16 or remove it",
        )


_RULES: tuple[Callable[[RunConfig, Provenance], Iterator[ConfigError]], ...] = (
    _engine_name,
    _refused_by_engine,
    _zero,
    check_fsdp,
    check_tensor,
    check_pipeline,
    _precision,
    _optimizer,
    _schedule,
    _embeddings,
    _power_sgd,
    _generation,
    _shard_size,
    _best_model,
    _resume,
    _native,
)
_MACHINE_RULES: tuple[Callable[[RunConfig, Provenance, Machine], Iterator[ConfigError]], ...] = (
    check_ranks,
    _fp16_device,
    _bf16_hook_device,
)
_DATA_RANK_RULES: tuple[Callable[[RunConfig, Provenance, Machine], Iterator[ConfigError]], ...] = (
    _zero_plus_plus,
    check_fsdp_machine,
)
