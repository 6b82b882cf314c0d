"""FSDP2: values that follow from `fsdp` and `zero`, and settings that contradict one another. Pure.

Stage 3 is `reshard_after_forward` true, stage 2 false; ZeRO++'s secondary partition is a number. FSDP2 offloads
parameters, gradients and optimizer states together.

Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_trainer.config.backend import backend
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError, one_of

_STAGES = {2: False, 3: True}
_POLICIES = {"transformer_layer_cls_to_wrap": "transformer_based_wrap", "min_num_params": "size_based_wrap"}
"""Key -> the policy that uses it."""


def check_fsdp(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    """Every fault that shows without knowing the machine."""
    if backend(config) != "fsdp2":
        return
    yield from _stage(config, given)
    yield from _offload(config, given)
    yield from _wrapping(config, given)
    precision = config.precision
    if None not in (precision.grad_dtype, precision.communication_data_type) and (
        precision.grad_dtype != precision.communication_data_type
    ):
        yield ConfigError(
            f"{given.describe('precision.grad_dtype')} and {given.describe('precision.communication_data_type')}",
            "FSDP2 accumulates micro-batches in the dtype in which it reduces them",
            "set both to the same dtype, or remove one",
        )
    if config.parallel.engine == "accelerate" and type(config.fsdp.reshard_after_forward) is int:
        yield ConfigError(
            f"{given.describe('fsdp.reshard_after_forward')} with parallel.engine 'accelerate'",
            "accelerate's FSDP plugin takes true or false",
            "set fsdp.reshard_after_forward to true, or parallel.engine to fsdp2",
        )


def check_fsdp_machine(config: RunConfig, given: Provenance, machine: Machine) -> Iterator[ConfigError]:
    """Every fault that shows once the kind of device and the number of data-parallel ranks are known."""
    if backend(config) != "fsdp2":
        return
    if config.parallel.engine == "accelerate" and machine.device == "cpu":
        yield ConfigError(
            f"{given.describe('accelerate.backend')} on cpu",
            "accelerate shards with FSDP2 on GPUs only, and ignores its plugin on a CPU",
            "set parallel.engine to fsdp2, or accelerate.backend to ddp or deepspeed",
        )
    replicate, shard = config.parallel.dp_replicate, config.parallel.dp_shard
    if machine.world % replicate or (shard is not None and replicate * shard != machine.world):
        sizes = [n for n in range(1, machine.world + 1) if machine.world % n == 0]
        said = f"{given.describe('parallel.dp_replicate')} and {given.describe('parallel.dp_shard')}"
        yield ConfigError(
            f"{said} on {machine.world} data-parallel ranks",
            "data-parallel ranks = dp_replicate x dp_shard",
            f"set parallel.dp_replicate to {one_of(sizes)}, and remove parallel.dp_shard",
        )
        return
    ranks = machine.world // replicate
    number = _reshard(config, given)[0]
    if type(number) is int and (ranks % number or number >= ranks):
        works = [n for n in range(2, ranks) if ranks % n == 0]
        key = (
            "fsdp.reshard_after_forward"
            if given.is_set("fsdp.reshard_after_forward")
            else "zero.zero_hpz_partition_size"
        )
        yield ConfigError(
            f"{given.describe(key)} with {ranks} ranks to a replica of the model",
            "the number divides these ranks and is smaller",
            f"set {key} to {' or '.join(map(str, works))}" if works else f"remove {key}: {ranks} ranks allow no number",
        )


def derive_fsdp(config: RunConfig, given: Provenance, machine: Machine) -> dict[str, tuple[Any, str]]:
    """Open values of `fsdp` and `parallel`, on the data-parallel ranks of a machine -> value and reason."""
    derived: dict[str, tuple[Any, str]] = {}
    if config.parallel.dp_shard is None:
        replicate = config.parallel.dp_replicate
        reason = f"{machine.world} data-parallel ranks / dp_replicate {replicate}"
        derived["parallel.dp_shard"] = (machine.world // replicate, reason)
    if config.fsdp.reshard_after_forward is None:
        derived["fsdp.reshard_after_forward"] = _reshard(config, given)
    for name, policy in _POLICIES.items():
        if config.fsdp.auto_wrap_policy is None and given.is_set(f"fsdp.{name}"):
            derived["fsdp.auto_wrap_policy"] = (policy, f"fsdp.{name}")
    if config.fsdp.cpu_offload is None:
        on_host = config.zero.offload_param.device == "cpu"
        reason = "zero.offload_optimizer and zero.offload_param" if on_host else "nothing asks for it"
        derived["fsdp.cpu_offload"] = (on_host, reason)
    if config.fsdp.pin_memory is None:
        derived["fsdp.pin_memory"] = _pin_memory(config, machine)
    return derived


def _pin_memory(config: RunConfig, machine: Machine) -> tuple[bool, str]:
    for name in ("offload_optimizer", "offload_param"):
        if (said := getattr(config.zero, name).pin_memory) is not None:
            return said, f"zero.{name}.pin_memory"
    return machine.device == "cuda", f"the device is {machine.device}"


def _reshard(config: RunConfig, given: Provenance) -> tuple[bool | int, str]:
    """`reshard_after_forward` and where it comes from."""
    value = config.fsdp.reshard_after_forward
    if value is not None:
        return value, given.origin("fsdp.reshard_after_forward")
    if config.zero.zero_hpz_partition_size > 1:
        return config.zero.zero_hpz_partition_size, "zero.zero_hpz_partition_size"
    if given.is_set("zero.stage") and config.zero.stage in _STAGES:
        return _STAGES[config.zero.stage], f"zero.stage {config.zero.stage}"
    if config.parallel.pp > 1:
        return (
            False,
            "freed parameters would be gathered again for each micro-batch, in both directions of the pipeline",
        )
    return True, "least memory, as fully_shard does"


def _stage(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    stage, reshard = config.zero.stage, config.fsdp.reshard_after_forward
    if not given.is_set("zero.stage"):
        return
    if stage not in _STAGES:
        yield ConfigError(
            f"{given.describe('zero.stage')} on fsdp2",
            "FSDP2 always shards gradients and optimizer states, and keeps parameters (2) or frees them (3)",
            "set zero.stage to 2 or 3, or parallel.engine to " + ("ddp" if stage == 0 else "deepspeed"),
        )
    elif reshard is not None and bool(reshard) != _STAGES[stage]:
        yield ConfigError(
            f"{given.describe('fsdp.reshard_after_forward')} and {given.describe('zero.stage')}",
            "stage 3 frees parameters after the forward pass, stage 2 does not",
            "remove one of the two",
        )
    hpz = config.zero.zero_hpz_partition_size
    if hpz > 1 and (stage == 2 or reshard not in (None, hpz)):
        yield ConfigError(
            f"{given.describe('zero.zero_hpz_partition_size')}, {given.describe('zero.stage')} and "
            f"{given.describe('fsdp.reshard_after_forward')}",
            "ZeRO++'s secondary partition is reshard_after_forward as a number",
            "set fsdp.reshard_after_forward alone",
        )


def _offload(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    devices = {name: getattr(config.zero, name).device for name in ("offload_optimizer", "offload_param")}
    nvme = [name for name, device in devices.items() if device == "nvme"]
    for name in nvme:
        yield ConfigError(
            f"{given.describe(f'zero.{name}.device')} on fsdp2",
            "FSDP2 offloads to the host, and has no NVMe",
            f"set zero.{name}.device to cpu, or parallel.engine to deepspeed",
        )
    if nvme:
        return
    on_host = set(devices.values())
    if len(on_host) == 2 and config.fsdp.cpu_offload is None:
        yield ConfigError(
            f"{given.describe('zero.offload_optimizer.device')} and "
            f"{given.describe('zero.offload_param.device')} on fsdp2",
            "FSDP2 keeps parameters, gradients and optimizer states on the host together, or none of them",
            "set both to cpu, or fsdp.cpu_offload to true or false",
        )
    elif config.fsdp.cpu_offload is not None and any(
        given.origin(f"zero.{name}.device") != "default" and (device == "cpu") != config.fsdp.cpu_offload
        for name, device in devices.items()
    ):
        yield ConfigError(
            f"{given.describe('fsdp.cpu_offload')}, {given.describe('zero.offload_optimizer.device')} and "
            f"{given.describe('zero.offload_param.device')}",
            "they are two settings of one thing, and differ",
            "remove fsdp.cpu_offload, or both devices",
        )
    if given.is_set("fsdp.pin_memory") and not config.fsdp.cpu_offload and on_host != {"cpu"}:
        yield ConfigError(
            f"{given.describe('fsdp.pin_memory')} without fsdp.cpu_offload",
            "host memory is page-locked for offload only",
            "set fsdp.cpu_offload to true or remove fsdp.pin_memory",
        )


def _wrapping(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    for name, policy in _POLICIES.items():
        if given.is_set(f"fsdp.{name}") and config.fsdp.auto_wrap_policy not in (None, policy):
            yield ConfigError(
                f"{given.describe(f'fsdp.{name}')} and {given.describe('fsdp.auto_wrap_policy')}",
                f"it is used by {policy} only",
                f"set fsdp.auto_wrap_policy to {policy} or remove fsdp.{name}",
            )
    if all(given.is_set(f"fsdp.{name}") for name in _POLICIES) and config.fsdp.auto_wrap_policy is None:
        yield ConfigError(
            " and ".join(given.describe(f"fsdp.{name}") for name in _POLICIES),
            "modules are gathered by class or by size",
            "remove one of the two",
        )
    if given.is_set("fsdp.prefetch_depth") and config.fsdp.auto_wrap_policy == "no_wrap":
        yield ConfigError(
            f"{given.describe('fsdp.prefetch_depth')} and {given.describe('fsdp.auto_wrap_policy')}",
            "modules that are gathered all at once cannot be gathered ahead",
            "remove one of the two",
        )
