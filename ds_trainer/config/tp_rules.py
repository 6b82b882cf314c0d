"""Checks of tensor parallelism: against other keys, the ranks, and the checkpoint's sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ds_trainer.config.backend import backend
from ds_trainer.config.keys import default
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.tp_plan_rules import check_plan, plan_warnings, suggested
from ds_trainer.errors import ConfigError
from ds_trainer.planning.checkpoint_spec import ModelSpec
from ds_trainer.planning.tp_divisibility import tp_size_problem
from ds_trainer.planning.tp_plan import STYLE_NAMES, plan_for
from ds_trainer.planning.tp_shards import TensorShards

_NEEDS_TP = ("tp_plan", "sequence_parallel", "keep_gathered_input")
_HANGS = "torch creates the smaller process groups of different tensor-parallel ranks at the same time, and hangs"
_GROUPS_OF_ALL_RANKS = ("zero_hpz_partition_size", "zero_quantized_gradients")


def check_tensor(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    """Every fault that shows without knowing machine and model."""
    parallel = config.parallel
    if parallel.engine == "accelerate":
        return  # accelerate refuses tensor parallelism as such.
    if parallel.tp == 1:
        yield from _without_tp(given)
        return
    if parallel.keep_gathered_input and not parallel.sequence_parallel:
        yield ConfigError(
            f"{given.describe('parallel.keep_gathered_input')} and {given.describe('parallel.sequence_parallel')}",
            "a layer's input is gathered under sequence parallelism only",
            "set parallel.sequence_parallel to true or remove parallel.keep_gathered_input",
        )
    unknown = {style: None for style in (parallel.tp_plan or {}).values() if style not in STYLE_NAMES}
    if unknown:
        yield ConfigError(
            f"parallel.tp_plan ({given.origin('parallel.tp_plan')}) has the styles {', '.join(unknown)}",
            "a style says how a module is sharded, by its name in transformers",
            f"use {', '.join(STYLE_NAMES)}",
        )
    if config.optimizer.name == "adafactor" and backend(config) == "ddp":
        yield ConfigError(
            f"{given.describe('optimizer.name')} and {given.describe('parallel.tp')}",
            "adafactor looks at whole matrices, and tensor parallelism shards them",
            "set optimizer.name to adamw or parallel.tp to 1",
        )
    if backend(config) == "deepspeed" and config.zero.stage == 0 and config.precision.dtype == "fp16":
        yield ConfigError(
            f"{given.describe('precision.dtype')} at {given.describe('zero.stage')} and "
            f"{given.describe('parallel.tp')}",
            "tensor-parallel ranks compare their master weights, which DeepSpeed keeps in one buffer here",
            "set zero.stage to 1, precision.dtype to bf16, or parallel.tp to 1",
        )
    if backend(config) == "fsdp2" and type(config.fsdp.reshard_after_forward) is int:
        yield ConfigError(
            f"{given.describe('fsdp.reshard_after_forward')} and {given.describe('parallel.tp')}",
            _HANGS,
            "set fsdp.reshard_after_forward to true or false, or parallel.tp to 1",
        )
    elif backend(config) == "fsdp2" and config.zero.zero_hpz_partition_size > 1:
        yield ConfigError(
            f"{given.describe('zero.zero_hpz_partition_size')} on fsdp2 and {given.describe('parallel.tp')}",
            _HANGS,
            "remove zero.zero_hpz_partition_size or set parallel.tp to 1",
        )
    for name in _GROUPS_OF_ALL_RANKS:
        if backend(config) == "deepspeed" and getattr(config.zero, name) != default(f"zero.{name}"):
            yield ConfigError(
                f"{given.describe(f'zero.{name}')} and {given.describe('parallel.tp')}",
                "DeepSpeed forms its groups of neighbouring ranks, and those hold different shards of the same layers",
                f"remove zero.{name} or set parallel.tp to 1",
            )


def _without_tp(given: Provenance) -> Iterator[ConfigError]:
    for name in _NEEDS_TP:
        if given.is_set(f"parallel.{name}"):
            yield ConfigError(
                f"{given.describe(f'parallel.{name}')} and {given.describe('parallel.tp')}",
                "it is about layers that are sharded over several ranks",
                f"set parallel.tp or remove parallel.{name}",
            )


def check_tensor_model(config: RunConfig, given: Provenance, spec: ModelSpec) -> Iterator[ConfigError]:
    """A model without a plan, with a plan that does not fit it, or with heads and widths that do not divide."""
    if config.parallel.tp == 1:
        return
    if shards := shares_of(config, spec):
        if refused := tp_size_problem(config.parallel.tp, shards.units()):
            found, rule, change = refused
            yield ConfigError(f"{found} ({given.origin('parallel.tp')})", rule, change)
        yield from check_plan(config, given, shards)
    elif spec.family is not None:
        yield ConfigError(
            f"{given.describe('parallel.tp')}, and there is no plan for model type {spec.model_type!r}",
            "a plan says which layers are sharded and how; without one every rank would train the same full model",
            f"{suggested(spec)}; or set parallel.tp to 1",
        )


def shares_of(config: RunConfig, spec: ModelSpec) -> TensorShards | None:
    """The shards of the model; None where there is no plan for it."""
    plan = plan_for(spec.model_type, config.parallel.tp_plan)
    return TensorShards(spec, plan) if plan is not None else None


def tensor_warnings(config: RunConfig, machine: Machine, spec: ModelSpec | None) -> Iterator[str]:
    """Settings that are slow, and checks that are left to the load of the model."""
    tp, node = config.parallel.tp, machine.node_ranks
    if tp == 1:
        return
    if node is not None and machine.world > node and node % tp:
        fit = [size for size in range(1, node + 1) if node % size == 0]
        yield (
            f"parallel.tp {tp} crosses nodes of {node} ranks: every layer's all-reduces, of full activations and in "
            f"both passes, wait for the network; sizes that stay on a node: {', '.join(map(str, fit))}"
        )
    shards = None if spec is None else shares_of(config, spec)
    if shards is not None:
        yield from plan_warnings(config, shards)
    if spec is None or (shards is not None and not spec.pickled and shards.names_agree):
        return
    if spec.pickled:
        why = "the model's weights are pickled"
    elif shards is None:
        why = f"model type {spec.model_type!r} is not in families.json"
    else:
        why = "the checkpoint's names are not those of the model"
    yield f"{why}: whether parallel.tp {tp} fits is checked at load"
