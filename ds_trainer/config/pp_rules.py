"""Checks of a pipeline: against other keys, its schedule, and the checkpoint's layers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ds_trainer.config.backend import backend
from ds_trainer.config.keys import default, value
from ds_trainer.config.model_rules import CAUSAL
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.stage_assignment import check_stages, model_parts, num_stages, refused_stages
from ds_trainer.errors import ConfigError
from ds_trainer.planning.checkpoint_spec import ModelSpec
from ds_trainer.planning.pp_plan import pp_unsupported_reason, stage_plan

_NEEDS_PP = ("schedule", "virtual_stages", "pp_split")
_NO_REDUCER = "under a pipeline gradients are reduced once all passes are done, without DDP's reducer"


def check_pipeline(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    """Every fault that shows without knowing machine and model."""
    if config.parallel.engine == "accelerate":
        return  # accelerate refuses pipelines as such.
    if config.parallel.pp == 1:
        yield from _without_pp(config, given)
        return
    yield from _stages(config, given)
    if backend(config) == "deepspeed":
        yield from _zero(config, given)
    if backend(config) == "fsdp2":
        yield from _fsdp(config, given)
    if backend(config) == "ddp":
        yield from _ddp(config, given)
    if config.evaluation.generate_samples:
        yield ConfigError(
            f"{given.describe('evaluation.generate_samples')} and {given.describe('parallel.pp')}",
            "a model that is split into stages does not generate: each token would pass through all of them alone",
            "remove evaluation.generate_samples, and generate from the exported model",
        )
    if config.model.auto_class != CAUSAL:
        yield ConfigError(
            f"{given.describe('model.auto_class')} and {given.describe('parallel.pp')}",
            "the stages of a pipeline are made of a causal language model",
            f"set model.auto_class to {CAUSAL} or parallel.pp to 1",
        )


def _without_pp(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    for name in _NEEDS_PP:
        key = f"parallel.{name}"
        if value(config, key) != default(key):
            yield ConfigError(
                f"{given.describe(key)} and {given.describe('parallel.pp')}",
                "it is about a model that is split into stages",
                f"set parallel.pp or remove {key}",
            )


def _stages(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    parallel = config.parallel
    if refused := refused_stages(parallel):
        yield ConfigError(*refused)
    elif parallel.pp_split is not None and len(parallel.pp_split) != num_stages(parallel):
        yield ConfigError(
            f"{given.describe('parallel.pp_split')}, {len(parallel.pp_split)} stages, and there are "
            f"{num_stages(parallel)}",
            "it has one number for each of the parallel.pp x parallel.virtual_stages stages",
            f"set parallel.pp_split to {num_stages(parallel)} numbers, or remove it",
        )


def _zero(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if config.zero.stage == 0 and config.precision.dtype == "fp16" and config.parallel.tp == 1:  # tp has a rule for it.
        yield ConfigError(
            f"{given.describe('precision.dtype')} at {given.describe('zero.stage')} and "
            f"{given.describe('parallel.pp')}",
            "here DeepSpeed computes the gradient norm itself, and counts parameters that stages share in its own way",
            "set zero.stage to 1, precision.dtype to bf16, or parallel.pp to 1",
        )
    if config.zero.stage == 1 and config.zero.overlap_comm:
        yield ConfigError(
            f"{given.describe('zero.overlap_comm')} and {given.describe('parallel.pp')}",
            "DeepSpeed overlaps with the last backward pass of a step, and a pipeline has no such pass: gradients are "
            "reduced once all passes are done",
            "remove zero.overlap_comm or set parallel.pp to 1",
        )
    if config.zero.stage > 1:
        yield ConfigError(
            f"{given.describe('zero.stage')} and {given.describe('parallel.pp')}",
            "from stage 2 on DeepSpeed reduces and frees gradients in each backward pass, and a pipeline has passes of "
            "several micro-batches under way at once",
            "set zero.stage to 1, or parallel.engine to fsdp2, which shards gradients and parameters under a pipeline",
        )
    for name in ("offload_optimizer", "offload_param"):
        if getattr(config.zero, name).device == "nvme":
            yield ConfigError(
                f"{given.describe(f'zero.{name}.device')} and {given.describe('parallel.pp')}",
                "DeepSpeed offloads to NVMe at stage 3 only, which a pipeline does not have",
                f"set zero.{name}.device to {'cpu' if name == 'offload_optimizer' else 'none'}, or parallel.pp to 1",
            )


def _fsdp(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    for key, is_number in (
        ("fsdp.reshard_after_forward", type(config.fsdp.reshard_after_forward) is int),
        ("zero.zero_hpz_partition_size", config.zero.zero_hpz_partition_size > 1),
    ):
        if is_number:
            yield ConfigError(
                f"{given.describe(key)} on fsdp2 and {given.describe('parallel.pp')}",
                "torch creates the smaller process groups of different stages at the same time, and hangs",
                f"remove {key} or set parallel.pp to 1",
            )


def _ddp(config: RunConfig, given: Provenance) -> Iterator[ConfigError]:
    if config.ddp.comm_hook == "powersgd":
        yield ConfigError(
            f"{given.describe('ddp.comm_hook')} and {given.describe('parallel.pp')}",
            f"{_NO_REDUCER}, and PowerSGD keeps its errors by that reducer's buckets",
            "set ddp.comm_hook to bf16 or fp16, or remove it",
        )
    if config.ddp.static_graph:
        yield ConfigError(
            f"{given.describe('ddp.static_graph')} and {given.describe('parallel.pp')}",
            f"{_NO_REDUCER}, which it is about",
            "remove ddp.static_graph; ddp.find_unused_parameters lets parameters be without a gradient",
        )


def check_pipeline_model(config: RunConfig, given: Provenance, spec: ModelSpec) -> Iterator[ConfigError]:
    """A model that cannot be split into stages, or whose number of layers does not fit them."""
    if config.parallel.pp == 1:
        return
    if (why := pp_unsupported_reason(spec.model_type)) is not None:
        yield ConfigError(
            f"{given.describe('parallel.pp')}, and model.path is of type {spec.model_type!r}",
            why,
            "set parallel.pp to 1",
        )
    elif (parts := model_parts(spec)) is not None and not refused_stages(config.parallel):
        yield from check_stages(config, given, parts.num_layers)


def pipeline_warnings(config: RunConfig, given: Provenance, spec: ModelSpec | None) -> Iterator[str]:
    """Keys without effect under a pipeline, and checks that are left to the load of the model."""
    if config.parallel.pp == 1:
        return
    if backend(config) == "ddp" and given.is_set("ddp.gradient_as_bucket_view"):
        yield f"ddp.gradient_as_bucket_view has no effect: {_NO_REDUCER}"
    if spec is None:
        return
    if model_parts(spec) is None:
        yield f"the headers of {spec.folder} do not show its layers: parallel.pp is checked at load"
    elif stage_plan(spec.model_type) is None:
        yield f"model type {spec.model_type!r} is not in families.json: whether it can be split is checked at load"
