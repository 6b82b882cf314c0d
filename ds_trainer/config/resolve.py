"""Fills in every value that a config leaves open, each with its reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ds_trainer.config.backend import backend
from ds_trainer.config.batch import Pipeline, solve_batch
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.deepspeed.derive import check_parameter_buffer, derive_zero
from ds_trainer.config.deepspeed.rules import no_effect_of_zero
from ds_trainer.config.keys import leaf_values, value
from ds_trainer.config.model_rules import check_class, class_warnings
from ds_trainer.config.pp_rules import check_pipeline_model, pipeline_warnings
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import Machine, ModelSize, ResolvedConfig
from ds_trainer.config.rules import check_device_and_ranks, has_fused_kernel, no_effect_warnings
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.stage_assignment import derive_stages, rank_elements, refused_stages, virtual_stages
from ds_trainer.config.torch.fsdp_rules import derive_fsdp
from ds_trainer.config.tp_rules import check_tensor_model, tensor_warnings
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.planning.checkpoint_spec import ModelSpec

Implementation = Literal["torch", "torch_fused", "deepspeed_cpu"]
Derived = dict[str, tuple[Any, str]]
"""Dotted key -> value and reason."""


def resolve(
    config: RunConfig,
    origins: Mapping[str, str],
    machine: Machine,
    spec: ModelSpec | None = None,
    num_parameters: int | None = None,
    largest_parameter: int | None = None,
) -> ResolvedConfig:
    """Derives every open value of a run for one machine and model.

    Args:
        config: The run.
        origins: Dotted key -> the place that set it, as `load_config` returns it.
        machine: Ranks and device.
        spec: The checkpoint; None where it is not known.
        num_parameters: Elements of the model; None: the spec's.
        largest_parameter: Elements of its largest parameter; None: the spec's.

    Raises:
        ConfigErrors: The batch numbers contradict, the machine lacks something, samples would be longer than the
            model's positions, its layers do not divide by the tensor-parallel ranks or are fewer than the stages of a
            pipeline, a buffer is smaller than its largest parameter, or `native.deepspeed` contradicts.
    """
    given = Provenance(config, origins)
    errors = [*check_device_and_ranks(config, origins, machine), *_check_model(config, given, spec)]
    model_ranks = config.parallel.tp * config.parallel.pp
    if machine.world % model_ranks:
        raise ConfigErrors(errors)  # What follows depends on the number of data-parallel ranks.
    data_parallel = machine.data_parallel_view(model_ranks)
    derived = _precision(config, machine) | _run_values(config, machine)
    if not errors:
        derived |= derive_stages(config, spec)
    split = derived.get("parallel.pp_split", (config.parallel.pp_split,))[0]
    size = _size(config, spec, num_parameters, largest_parameter, split)
    try:
        derived |= _batch(config, data_parallel.world)
    except ConfigError as error:
        errors.append(error)
    derived |= _engine_values(config, given, origins, data_parallel, size, derived)
    if backend(config) == "deepspeed":
        errors += check_parameter_buffer(config.zero, origins, data_parallel, size)
    if errors:
        raise ConfigErrors(errors)
    complete = _with_values(config, {key: item for key, (item, _) in derived.items()})
    resolved = ResolvedConfig(
        config=complete,
        machine=machine,
        dp_size=data_parallel.world,
        optimizer_implementation=_implementation(complete),
        size=size,
        reasons=_reasons(config, origins, derived),
        warnings=tuple(_warnings(complete, given, origins, machine, spec)),
    )
    if config.native.deepspeed:
        to_deepspeed(resolved)  # raises where the native block contradicts
    return resolved


def _engine_values(
    config: RunConfig,
    given: Provenance,
    origins: Mapping[str, str],
    machine: Machine,
    size: ModelSize,
    derived: Derived,
) -> Derived:
    """Open values of the sections of the engine; `derived` has the dtypes, `machine` the data-parallel ranks only."""
    if backend(config) == "deepspeed":
        dtypes = tuple(
            derived.get(key, (value(config, key), ""))[0] for key in ("precision.dtype", "precision.grad_dtype")
        )
        return derive_zero(config.zero, dtypes, origins, machine, size)
    if backend(config) == "ddp" and config.ddp.find_unused_parameters is None:
        return {"ddp.find_unused_parameters": (False, "every parameter of a causal LM takes part in the loss")}
    return derive_fsdp(config, given, machine) if backend(config) == "fsdp2" else {}


def _reasons(config: RunConfig, origins: Mapping[str, str], derived: Derived) -> dict[str, str]:
    """Dotted key -> where its value comes from."""
    reasons = {key: origins.get(key, "default") for key in leaf_values(config)}
    return reasons | _open_reasons(config) | {key: reason for key, (_, reason) in derived.items()}


def total_steps(num_samples: int | None, global_size: int, epochs: int | None, max_steps: int | None) -> int:
    """Optimizer steps of a run.

    Every epoch has `ceil(num_samples / global_size)` steps: its last window may be short, so that each sample is seen
    once an epoch and no step reaches into the next one. 10 samples, 3 epochs, global size 16: 3 steps.

    Args:
        num_samples: Samples of one epoch; None where the data has no length.
        global_size: Samples per optimizer step over all ranks.
        epochs: Passes over the data; None: as many as `max_steps` needs.
        max_steps: Upper bound; None: none.

    Raises:
        ConfigError: Neither the data nor the config bounds the run.
    """
    bounds = [max_steps] if max_steps is not None else []
    if num_samples is not None and epochs is not None:
        bounds.append(epochs * math.ceil(num_samples / global_size))
    if not bounds:
        raise ConfigError(
            "the training data has no length and run.max_steps is not set",
            "the learning rate's schedule needs the number of optimizer steps",
            "set run.max_steps",
        )
    return min(bounds)


def _batch(config: RunConfig, dp_size: int) -> Derived:
    """The sizes of a batch that are left open.

    Raises:
        ConfigError: The given ones contradict one another or the pipeline.
    """
    batch = solve_batch(config.batch, dp_size, config.parallel.tp, _pipeline(config))
    derived: Derived = {f"batch.{name}": (getattr(batch, name), reason) for name, reason in batch.reasons.items()}
    if config.evaluation.batch_size is None:
        derived["evaluation.batch_size"] = (batch.micro_size, "batch.micro_size")
    return derived


def _pipeline(config: RunConfig) -> Pipeline | None:
    """The pipeline, whose schedule restricts the batch; None where there is none or it is refused anyway."""
    parallel = config.parallel
    if parallel.pp == 1 or refused_stages(parallel):
        return None
    return Pipeline(parallel.schedule, parallel.pp, virtual_stages(parallel))


def _size(
    config: RunConfig,
    spec: ModelSpec | None,
    num_parameters: int | None,
    largest: int | None,
    pp_split: tuple[int, ...] | None,
) -> ModelSize:
    """The size of the model on one rank; for an instance, which has no headers, an even division."""
    model_ranks = config.parallel.tp * config.parallel.pp
    found = rank_elements(config, spec, pp_split) if spec is not None and model_ranks > 1 else None
    if found is not None:
        num_parameters, largest = found
    else:
        num_parameters = num_parameters or (spec.num_parameters if spec else 0)
        num_parameters, largest = -(-num_parameters // model_ranks), largest or (spec.largest_parameter if spec else 0)
    return ModelSize(num_parameters or None, largest or None, spec.hidden_size if spec else None)


def _check_model(config: RunConfig, given: Provenance, spec: ModelSpec | None) -> Iterator[ConfigError]:
    """Every fault that a checkpoint's headers and config.json show."""
    if spec is None:
        return
    yield from _beyond_positions(config, given, spec)
    yield from check_class(config, spec)
    yield from check_tensor_model(config, given, spec)
    yield from check_pipeline_model(config, given, spec)


def _beyond_positions(config: RunConfig, given: Provenance, spec: ModelSpec) -> Iterator[ConfigError]:
    positions = spec.max_positions
    if positions and (config.data.max_length or 0) > positions:
        yield ConfigError(
            f"{given.describe('data.max_length')}, the model has {positions} positions",
            "a sample may not be longer than the model's positions",
            f"set data.max_length to at most {positions}",
        )


def _precision(config: RunConfig, machine: Machine) -> Derived:
    precision = config.precision
    derived: Derived = {}
    dtype = precision.dtype
    if dtype is None:
        dtype = "bf16" if "bf16" in machine.native_dtypes else "fp32"
        derived["precision.dtype"] = (dtype, machine.reason or f"what {machine.device} computes natively")
    grad_dtype = precision.grad_dtype
    if grad_dtype is None:
        grad_dtype, reason = "fp32", "no bit of a micro-batch's gradient is lost"
        if dtype == "fp16" and backend(config) == "deepspeed" and config.zero.stage == 0:
            grad_dtype, reason = "fp16", "DeepSpeed's fp16 at stage 0 accumulates in fp16"
        derived["precision.grad_dtype"] = (grad_dtype, reason)
    if precision.communication_data_type is None:
        hook = config.ddp.comm_hook
        if backend(config) == "ddp" and hook in ("bf16", "fp16"):
            derived["precision.communication_data_type"] = (hook, "ddp.comm_hook")
        else:
            derived["precision.communication_data_type"] = (grad_dtype, "precision.grad_dtype")
    return derived


def _run_values(config: RunConfig, machine: Machine) -> Derived:
    derived: Derived = {}
    if config.run.device is None:
        derived["run.device"] = (machine.device, "the device of this machine")
    if config.data.pin_memory is None:
        derived["data.pin_memory"] = (machine.device == "cuda", f"the device is {machine.device}")
    metric = config.evaluation.metric_for_best_model
    if metric is None and (config.evaluation.early_stopping_patience or config.checkpoint.load_best_model_at_end):
        metric = "eval_loss"
        derived["evaluation.metric_for_best_model"] = (metric, "what every evaluation has")
    if metric is not None and config.evaluation.greater_is_better is None:
        derived["evaluation.greater_is_better"] = (not metric.endswith("loss"), "the metric's name")
    if config.logging.run_name is None:
        derived["logging.run_name"] = (Path(config.run.output_dir).name or "run", "run.output_dir")
    if config.run.epochs is None and config.run.max_steps is None:
        derived["run.epochs"] = (1, "one pass where nothing else bounds the run")
    if config.schedule.warmup_steps is None and config.schedule.warmup_ratio is None:
        derived["schedule.warmup_steps"] = (0, "no warm-up is set")
    if config.optimizer.fused is None:
        fused = _implementation(config) == "torch_fused"
        reason = "one kernel is faster" if fused else "there is no fused kernel for it here"
        derived["optimizer.fused"] = (fused, reason)
    return derived


def _open_reasons(config: RunConfig) -> dict[str, str]:
    """The reasons of values that stay open: the data or the weights decide, or another key."""
    open_keys = {
        "model.tokenizer": (config.model.tokenizer, "the checkpoint's own"),
        "model.attn_implementation": (config.model.attn_implementation, "transformers chooses"),
        "data.max_length": (config.data.max_length, "the model's positions and the tokenizer's limit, at load"),
        "parallel.virtual_stages": (config.parallel.virtual_stages, "there is no pipeline"),
        "parallel.pp_split": (
            config.parallel.pp_split,
            "there is no pipeline" if config.parallel.pp == 1 else "so that the slowest stage is fastest, at load",
        ),
        "fsdp.auto_wrap_policy": (config.fsdp.auto_wrap_policy, "blocks where the model has them, at load"),
        "fsdp.transformer_layer_cls_to_wrap": (
            config.fsdp.transformer_layer_cls_to_wrap,
            "the blocks that transformers says are not to be split, at load",
        ),
        "fsdp.min_num_params": (config.fsdp.min_num_params, "1e8, less for small models, at load"),
        "fsdp.buffer_dtype": (config.fsdp.buffer_dtype, "as the model makes them"),
        "fsdp.prefetch_depth": (config.fsdp.prefetch_depth, "torch's own order"),
        "loss.chunk_tokens": (config.loss.chunk_tokens, "all positions at once"),
        "data.cache_dir": (config.data.cache_dir, "ds_trainer/ below the Hugging Face cache"),
        "checkpoint.export_dtype": (config.checkpoint.export_dtype, "the checkpoint's own, at load"),
    }
    reasons = {key: reason for key, (item, reason) in open_keys.items() if item is None}
    if config.run.max_steps is not None and config.run.epochs is None:
        reasons["run.epochs"] = "as many as run.max_steps needs"
    if config.schedule.warmup_steps is None and config.schedule.warmup_ratio is not None:
        reasons["schedule.warmup_steps"] = "schedule.warmup_ratio of all steps, rounded up, once the data is read"
    return reasons


def _implementation(config: RunConfig) -> Implementation:
    name = config.optimizer.name
    offloaded = backend(config) == "deepspeed" and config.zero.offload_optimizer.device != "none"
    if offloaded:
        return "deepspeed_cpu" if name in ("adamw", "adam", "lion") else "torch"
    return "torch_fused" if has_fused_kernel(config) and config.optimizer.fused is not False else "torch"


def _warnings(
    config: RunConfig, given: Provenance, origins: Mapping[str, str], machine: Machine, spec: ModelSpec | None
) -> Iterator[str]:
    """What a complete config does slowly or without effect, and what is checked at load only."""
    yield from no_effect_warnings(config, origins)
    if backend(config) == "deepspeed":
        yield from no_effect_of_zero(config, origins, machine)
    dtype = config.precision.dtype
    if dtype not in machine.native_dtypes:
        yield f"precision.dtype {dtype} is slow here: {machine.reason or machine.device}; fp32 is faster"
    if spec is not None:
        yield from class_warnings(config, spec)
    yield from tensor_warnings(config, machine, spec)
    yield from pipeline_warnings(config, given, spec)


def _with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a section with dotted keys replaced."""
    update = {key: item for key, item in values.items() if "." not in key}
    nested: dict[str, dict[str, Any]] = {}
    for key, item in values.items():
        name, dot, rest = key.partition(".")
        if dot:
            nested.setdefault(name, {})[rest] = item
    update |= {name: _with_values(getattr(section, name), part) for name, part in nested.items()}
    return section.model_copy(update=update)
