"""Checks of the `zero` section: settings that DeepSpeed would ignore, silently change, or fail at. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ds_trainer.config.deepspeed.stages_of_keys import (
    IGNORED_BY_BF16_OPTIMIZER,
    OFFLOAD_DEVICES,
    OFFLOAD_STAGES,
    STAGES,
    uses_bf16_optimizer,
)
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError

MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "adafactor": 0}
"""fp32 tensors of a parameter's size that an optimizer keeps; SGD keeps one with momentum."""


def moments(config: RunConfig) -> int:
    """fp32 tensors of a parameter's size that the config's optimizer keeps."""
    optimizer = config.optimizer
    return (1 if optimizer.momentum else 0) if optimizer.name == "sgd" else MOMENTS[optimizer.name]


def check_zero(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    """Every fault of the section that shows without knowing the machine."""
    for rule in _RULES:
        yield from rule(config, given)


def no_effect_of_zero(config: RunConfig, origins: Mapping[str, str], machine: Machine) -> list[str]:
    """One line for every key of a resolved config that was set and that DeepSpeed does not act on in this run."""
    zero, precision, given = config.zero, config.precision, Provenance(config, origins)
    found = []
    if uses_bf16_optimizer(zero.stage, precision.dtype, precision.grad_dtype, zero.offload_optimizer.device):
        why = "at stage 1 with bf16 and fp32 accumulation DeepSpeed uses its BF16_Optimizer, which does not read it"
        found += [
            f"zero.{name} has no effect: {why}" for name in IGNORED_BY_BF16_OPTIMIZER if given.is_set(f"zero.{name}")
        ]
    if zero.zero_quantized_gradients:
        found.append("zero.zero_quantized_gradients has no effect on one node: DeepSpeed quantizes between nodes only")
    if zero.offload_optimizer.ratio != 1.0 and machine.device == "cpu":
        found.append("zero.offload_optimizer.ratio has no effect: host and device are the same CPU")
    return found


def check_zero_machine(config: RunConfig, given: Provenance, machine: Machine) -> Iterator[ConfigError]:
    """Every fault of ZeRO++ that shows once the kind of device and the number of data-parallel ranks are known."""
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if getattr(config.zero, name) and machine.device == "cpu":
            yield ConfigError(
                f"{given.describe(f'zero.{name}')} on cpu",
                "DeepSpeed's quantizer is a CUDA kernel",
                f"remove zero.{name}",
            )
    size = config.zero.zero_hpz_partition_size
    if machine.world % size:
        yield ConfigError(
            f"{given.describe('zero.zero_hpz_partition_size')} with {machine.world} data-parallel ranks",
            "the secondary partition divides the data-parallel ranks evenly",
            f"set zero.zero_hpz_partition_size to a divisor of {machine.world}",
        )


def _zero_stages(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    stage = config.zero.stage
    for name, stages in STAGES.items():
        if stage not in stages and given.is_set(f"zero.{name}"):
            yield ConfigError(
                f"{given.describe(f'zero.{name}')} and {given.describe('zero.stage')}",
                f"DeepSpeed reads {name} at {_stages(stages)} only",
                f"remove zero.{name} or set zero.stage to {stages[0]}",
            )
    for (section, device), stages in OFFLOAD_STAGES.items():
        is_refused_anyway = device == "nvme" and config.parallel.pp > 1  # Whatever the stage.
        if getattr(config.zero, section).device == device and stage not in stages and not is_refused_anyway:
            key = f"zero.{section}.device"
            yield ConfigError(
                f"{given.describe(key)} and {given.describe('zero.stage')}",
                f"DeepSpeed does this at {_stages(stages)} only and silently does less elsewhere",
                f"set zero.stage to {stages[0]}{' or above' if len(stages) > 1 else ''}, or {key} to "
                + ("cpu or none" if section == "offload_optimizer" and stage and device == "nvme" else "none"),
            )


def _stages(stages: tuple[int, ...]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"


def _offload(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    for name, devices in OFFLOAD_DEVICES.items():
        section = name.partition(".")[0]
        if getattr(config.zero, section).device not in devices and given.is_set(f"zero.{name}"):
            device_key = f"zero.{section}.device"
            yield ConfigError(
                f"{given.describe(f'zero.{name}')} and {given.describe(device_key)}",
                f"{name} is used with {' and '.join(devices)} offload only",
                f"remove zero.{name} or set {device_key} to {devices[0]}",
            )
    for section in ("offload_optimizer", "offload_param"):
        part = getattr(config.zero, section)
        if part.device == "nvme" and not part.nvme_path:
            yield ConfigError(
                f"{given.describe(f'zero.{section}.device')} without zero.{section}.nvme_path",
                "nvme offload needs a folder on the drive",
                f"set zero.{section}.nvme_path",
            )
    nvme = "nvme" in (config.zero.offload_optimizer.device, config.zero.offload_param.device)
    for name in type(config.zero.aio).model_fields:
        if not nvme and given.is_set(f"zero.aio.{name}"):
            yield ConfigError(
                f"{given.describe(f'zero.aio.{name}')} without nvme offload",
                "zero.aio is used with nvme offload only",
                "remove zero.aio or set an offload device to nvme",
            )


def _offload_buffers(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    part = config.zero.offload_optimizer
    if part.device != "nvme":
        return
    # A sub-group in flight holds its master, gradient and moments; the pipeline keeps one more in flight each way.
    needed = (2 + moments(config)) * (1 + part.pipeline_read + part.pipeline_write)
    if part.buffer_count < needed:
        yield ConfigError(
            given.describe("zero.offload_optimizer.buffer_count"),
            f"{config.optimizer.name} swaps {2 + moments(config)} tensors per sub-group, and pipeline_read and "
            "pipeline_write keep one more sub-group in flight each; DeepSpeed stops in the first step when it has less",
            f"set zero.offload_optimizer.buffer_count to {needed}",
        )


def _partial_offload(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    key = "zero.offload_optimizer.ratio"
    if config.zero.offload_optimizer.ratio == 1.0:
        return
    if config.zero.stage != 3:
        yield ConfigError(
            f"{given.describe(key)} and {given.describe('zero.stage')}",
            "partial offload exists at stage 3 only",
            f"set {key} to 1.0",
        )
    if config.optimizer.name != "adamw":
        yield ConfigError(
            f"{given.describe(key)} and {given.describe('optimizer.name')}",
            "DeepSpeed updates the part on the device with AdamW, whatever the optimizer",
            f"set {key} to 1.0 or optimizer.name to adamw",
        )
    schedule = config.schedule
    if schedule.name != "constant" or schedule.warmup_steps or schedule.warmup_ratio:
        yield ConfigError(
            f"{given.describe(key)} with a learning rate that changes ({given.describe('schedule.name')})",
            "DeepSpeed updates the part on the device with a second optimizer that keeps its first learning rate",
            f"set {key} to 1.0, or schedule.name to constant without warm-up",
        )


def _zero_plus_plus(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if config.zero.zero_quantized_gradients and not config.zero.reduce_scatter:
        yield ConfigError(
            f"{given.describe('zero.zero_quantized_gradients')} and {given.describe('zero.reduce_scatter')}",
            "DeepSpeed quantizes gradients in its reduce-scatter only",
            "set zero.reduce_scatter to true",
        )


def _buckets(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    size = config.zero.allgather_bucket_size
    if size is not None and size % 2:
        yield ConfigError(
            given.describe("zero.allgather_bucket_size"),
            "DeepSpeed needs an even number of elements",
            f"set it to {size + 1}",
        )


_RULES: tuple[Callable[[RunConfig, Provenance], Iterator[ConfigError]], ...] = (
    _zero_stages,
    _offload,
    _offload_buffers,
    _partial_offload,
    _zero_plus_plus,
    _buckets,
)
