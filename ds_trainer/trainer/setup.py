"""Puts a run together. The order in which parts are made and applied is stated here and nowhere else.

config -> grid -> mesh -> resolve -> checkpoint -> machine checks -> data -> skeleton -> tensor-parallel split
       -> pipeline cut -> weights -> engine -> optimizer -> executor -> asked = got

The process group comes first, so that whatever a rank finds wrong after it is every rank's error.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ds_trainer.callbacks.best_metric import require_evaluations
from ds_trainer.callbacks.trackers import check_trackers
from ds_trainer.checkpoint.folder import STATE
from ds_trainer.checkpoint.shard_reader import MasterWeights
from ds_trainer.config.accelerate.launcher_conflicts import check_accelerate_launch
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.rank_rules import check_ranks
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine, ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.stage_assignment import assign_layers, check_stages, num_stages, virtual_stages
from ds_trainer.data.consistency import check_same_dataset
from ds_trainer.data.loader_factory import LoaderFactory
from ds_trainer.data.prepare import read_chat_template
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.distributed.device import probe_machine
from ds_trainer.distributed.process_groups import Mesh, init_mesh
from ds_trainer.distributed.store_barrier import barrier_after
from ds_trainer.engines.base import Engine, make_engine
from ds_trainer.engines.dtypes import TORCH_DTYPES
from ds_trainer.errors import ConfigError, ConfigErrors, ModelError
from ds_trainer.executors.accumulate import AccumulateExecutor
from ds_trainer.executors.base import Executor
from ds_trainer.executors.pipeline import PipelineExecutor
from ds_trainer.health.expected_wait import expected_wait
from ds_trainer.health.hang import Timeouts
from ds_trainer.host.deepspeed_ops import ensure_ops, required_ops
from ds_trainer.host.preflight import check_resources
from ds_trainer.launch import signals
from ds_trainer.launch.environment import grid_from_environment
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.log import get_logger, warn_once
from ds_trainer.loss import LossFunction, make_loss
from ds_trainer.models.build import build_model
from ds_trainer.models.chunked_cross_entropy import chunk_cross_entropy
from ds_trainer.models.hub import resolve_folder
from ds_trainer.models.pretrained import is_causal_lm, load_tokenizer
from ds_trainer.models.weight_source import ModuleWeights, WeightSource
from ds_trainer.optim import hand_over, make_optimizer
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.parallel.pipeline.cut import cut_model
from ds_trainer.parallel.pipeline.deferred_linear import enable_deferred_weight_gradients
from ds_trainer.parallel.pipeline.stages import StagedModel
from ds_trainer.parallel.pipeline.trace_model import refusal
from ds_trainer.parallel.tensor.local_weights import LocalWeights
from ds_trainer.parallel.tensor.parallelize import split_model
from ds_trainer.parallel.tensor.vocab_parallel_head import make_cross_entropy
from ds_trainer.parallel.tied_parameters import StageParameters
from ds_trainer.planning.checkpoint_spec import ModelSpec, read_spec
from ds_trainer.planning.pp_costs import FACTS, ModelParts, StageRanges
from ds_trainer.planning.pp_schedules import splits_backward, stages_of
from ds_trainer.run_folder import claimed
from ds_trainer.trainer.eval_samples import prompts_to_continue
from ds_trainer.trainer.inputs import TrainerInputs
from ds_trainer.trainer.resume_checks import check_layout, check_model, check_run, check_world, find_checkpoint
from ds_trainer.trainer.run import Run
from ds_trainer.trainer.verify_setup import check_asked_is_got


def set_up(config: RunConfig, origins: dict[str, str], given: TrainerInputs) -> Run:
    """Makes every part of a run, in order.

    Raises:
        UserError: Any fault of config, machine, data or model; on every rank the same one.
    """
    given.check(config)
    grid = _grid(config, origins)
    machine = replace(probe_machine(grid.world, config.run.device), node_ranks=grid.local_world)
    mesh = init_mesh(grid, machine.device, Timeouts(config.run.stuck_timeout_s, config.run.collective_timeout_s))
    with mesh.monitor.guard():
        return _set_up_on(mesh, machine, config, origins, given)


def _grid(config: RunConfig, origins: dict[str, str]) -> Grid:
    """This rank's place, with the mesh axes that the config asks for.

    Raises:
        ConfigErrors: The ranks cannot be laid out along them.
    """
    grid = grid_from_environment()
    if misfits := list(check_ranks(config, Provenance(config, origins), Machine(grid.world))):
        raise ConfigErrors(misfits)
    return replace(grid, tp_size=config.parallel.tp, pp_size=config.parallel.pp)


def _set_up_on(mesh: Mesh, machine: Machine, config: RunConfig, origins: dict[str, str], given: TrainerInputs) -> Run:
    grid = mesh.grid
    with consensus(mesh, "the config"):
        spec = None if given.model is not None else _read_spec(config)
        sizes = _sizes(spec, given.model)
        resolved = resolve(config, origins, machine, spec, *sizes)
        if contradictions := check_accelerate_launch(os.environ, resolved):
            raise ConfigErrors(contradictions)
    trains = given.train_dataset is not None or config.data.train is not None
    checkpoint = find_checkpoint(resolved, mesh, trains)
    whole = checkpoint is not None and not config.checkpoint.resume_weights_only
    with consensus(mesh, "the checks of the machine"):
        if checkpoint is not None and whole:
            check_world(checkpoint, resolved, grid.world)
        _check_before_loading(resolved, sizes[0], grid)
    _stop_if_asked(mesh)
    _seed(config.run.seed, grid)
    with consensus(mesh, "the tokenizer"):
        tokenizer = given.processing_class or _tokenizer(config, spec, required=given.data_collator is None)
        if tokenizer is not None and config.data.chat_template is not None:
            tokenizer.chat_template = read_chat_template(config.data.chat_template)  # The export carries it too.
    with consensus(mesh, "the data"), barrier_after(mesh, "data preparation"):
        loaders = _loader_factory(resolved, given, tokenizer, spec, grid)
        train_loader, eval_loader = loaders.train(given.train_dataset), loaders.eval(given.eval_dataset)
    _stop_if_asked(mesh)
    probes, _ = check_same_dataset(train_loader, mesh, "train"), check_same_dataset(eval_loader, mesh, "eval")
    with consensus(mesh, "the model"):
        if checkpoint is not None and whole and train_loader is not None:
            check_run(checkpoint, resolved, checkpoint.json(STATE), train_loader.sampler.num_samples, probes)
        model, weights = build_model(resolved.config, given.model, spec, tokenizer)
        positions = loaders.max_positions
        if train_loader is not None:
            require_evaluations(resolved.config, eval_loader is not None)
        eval_prompts = prompts_to_continue(resolved.config.evaluation, eval_loader, model, tokenizer, positions)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        trained = {name: shapes[name] for name, p in model.named_parameters() if p.requires_grad}
        staged, split = _cut_up(model, resolved, Provenance(config, origins), shapes, trained, positions, mesh)
        loss = _loss(model, split, staged, resolved, given, mesh)
        if checkpoint is not None:
            check_model(checkpoint, trained)
    if isinstance(weights, ModuleWeights):
        mesh.broadcast_over_world(weights.values.values())
    if checkpoint is not None:
        weights = MasterWeights(checkpoint.shards(), weights)
    export_dtype = _export_dtype(config, given.model, spec)
    engine = _engine(mesh, resolved, model, weights, split, given.optimizer)
    with consensus(mesh, "asked = got"):
        facts = check_asked_is_got(resolved, engine, mesh)
        if checkpoint is not None and whole:
            check_layout(checkpoint, resolved, engine.parameter_layout(), grid.rank)
    _stop_if_asked(mesh)
    return Run(
        resolved=resolved,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        loaders=loaders,
        engine=engine,
        loss=loss,
        executor=_executor(engine, loss, mesh, staged, resolved),
        train_loader=train_loader,
        eval_loader=eval_loader,
        eval_prompts=eval_prompts,
        facts=facts,
        export_dtype=export_dtype,
        data_probes=probes,
        num_trained=sum(map(prod, trained.values())),
        checkpoint=checkpoint if whole else None,
    )


def _cut_up(
    model: Any,
    resolved: ResolvedConfig,
    given: Provenance,
    shapes: Mapping[str, tuple[int, ...]],
    trained: Iterable[str],
    positions: int | None,
    mesh: Mesh,
) -> tuple[StagedModel | None, ModelSplit]:
    """Splits a model over the tensor ranks, and of that leaves this rank's stages; in place.

    Args:
        model: The model.
        resolved: The run's config.
        given: Where the values of the config come from.
        shapes: Full shape of every parameter.
        trained: Names of those that are trained.
        positions: The most that the model takes.
        mesh: Process groups.
    """
    parallel, grid = resolved.config.parallel, mesh.grid
    split = split_model(model, parallel, mesh)
    layout = (parallel.schedule, parallel.pp, virtual_stages(parallel))
    own = stages_of(*layout, grid.pp_rank)
    mesh.monitor.runs_stages(own, num_stages(parallel))
    if parallel.pp == 1:
        return None, split
    ranges = resolved.stages or _assign_layers(model, resolved, given, shapes, positions)
    owners = {stage: rank for rank in range(parallel.pp) for stage in stages_of(*layout, rank)}
    staged = cut_model(model, ranges, own, owners.__getitem__)
    _require_trained(trained, staged, parallel.pp)
    if splits_backward(parallel.schedule):
        enable_deferred_weight_gradients(model)
    stages = StageParameters(shapes, staged.owners, staged.copies, grid.pp_rank, mesh.pp_group, mesh.pp_host_group)
    return staged, replace(split, stages=stages)


def _require_trained(trained: Iterable[str], staged: StagedModel, num_ranks: int) -> None:
    idle = sorted(set(range(num_ranks)) - {staged.owners[name] for name in trained})
    if idle:
        raise ModelError(
            f"pipeline rank {', '.join(map(str, idle))} of {num_ranks} has no parameter that requires a gradient",
            "each rank of a pipeline has an optimizer of its own",
            "set parallel.pp_split so that each rank has a layer that is trained, or parallel.pp to fewer ranks",
        )


def _assign_layers(
    model: Any,
    resolved: ResolvedConfig,
    given: Provenance,
    shapes: Mapping[str, tuple[int, ...]],
    positions: int | None,
) -> StageRanges:
    """The layers of every stage of a model whose checkpoint has not told them."""
    text = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    parts = ModelParts(shapes, {name: getattr(text, name) for name in FACTS if hasattr(text, name)})
    if not parts.num_layers:
        raise refusal(
            f"{type(model).__name__} has no layers with numbers", "stages are made of a language model's layers"
        )
    if faults := list(check_stages(resolved.config, given, parts.num_layers)):
        raise ConfigErrors(faults)
    return assign_layers(resolved.config, parts, positions)


def _executor(
    engine: Engine, loss: LossFunction, mesh: Mesh, staged: StagedModel | None, resolved: ResolvedConfig
) -> Executor:
    if staged is None:
        return AccumulateExecutor(engine, loss, mesh)
    return PipelineExecutor(engine, loss, mesh, staged, resolved.config.parallel)


def _engine(
    mesh: Mesh,
    resolved: ResolvedConfig,
    model: nn.Module,
    weights: WeightSource,
    split: ModelSplit,
    optimizer: torch.optim.Optimizer | None,
) -> Engine:
    """The engine with the model's values in place and the optimizer around them."""
    engine = make_engine(resolved, mesh)
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    engine.load(model, LocalWeights(weights, split), split)
    if optimizer is not None:
        hand_over(optimizer, parameters, dict(model.named_parameters()))
    engine.wrap(lambda named: make_optimizer(named, shapes, resolved, optimizer))
    engine.module.train()
    return engine


def _loss(
    model: Any,
    split: ModelSplit,
    staged: StagedModel | None,
    resolved: ResolvedConfig,
    given: TrainerInputs,
    mesh: Mesh,
) -> LossFunction:
    """The run's loss; one that is computed in chunks is part of the model's forward."""
    config = resolved.config.loss
    has_head = staged is None or num_stages(resolved.config.parallel) - 1 in staged.stages
    cross_entropy = make_cross_entropy(model, split, mesh, config.label_smoothing)
    loss = make_loss(type(model).__name__, is_causal_lm(model), config, given.compute_loss_func, cross_entropy)
    if config.chunk_tokens is not None and has_head:
        chunk_cross_entropy(model, config.chunk_tokens, cross_entropy)
    return loss


def _stop_if_asked(mesh: Mesh) -> None:
    """Ends a run that a signal stops before its first step; there is nothing to save."""
    if agree(mesh, "set-up").stop:
        get_logger().warning("stopped before the first step (exit code %d)", signals.EXIT_CODE)
        signals.forget()
        raise signals.StopRequested


def _read_spec(config: RunConfig) -> ModelSpec:
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set and no model was handed to Trainer",
            "a run trains one checkpoint",
            "set model.path to a checkpoint's folder or hub id, or pass Trainer(model=...)",
        )
    with expected_wait():  # A download may stall.
        folder = resolve_folder(config.model.path, config.model.revision, config.model.allow_pickle)
    return read_spec(folder)


def _sizes(spec: ModelSpec | None, model: nn.Module | None) -> tuple[int | None, int | None]:
    """Elements of the whole model and of its largest parameter."""
    if model is not None:
        counts = [parameter.numel() for parameter in model.parameters()]
        return sum(counts), max(counts)
    assert spec is not None
    return spec.num_parameters or None, spec.largest_parameter or None


def _export_dtype(config: RunConfig, model: nn.Module | None, spec: ModelSpec | None) -> torch.dtype:
    if config.checkpoint.export_dtype is not None:
        return TORCH_DTYPES[config.checkpoint.export_dtype]
    if model is not None:
        return next(model.parameters()).dtype
    assert spec is not None
    formats = Counter(tensor.dtype for tensor in spec.tensors.values())
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
    return TORCH_DTYPES[names.get(formats.most_common(1)[0][0], "fp32") if formats else "fp32"]


def _check_before_loading(resolved: ResolvedConfig, num_parameters: int | None, grid: Grid) -> None:
    for text in resolved.warnings:
        warn_once(text)
    check_resources(resolved, num_parameters, grid)
    if grid.rank == 0:
        check_trackers(resolved.config.logging)
        with claimed(Path(resolved.config.run.output_dir)):
            pass  # Told before the model is loaded; held from the first step on.
    with expected_wait():  # Another process may be compiling them.
        ensure_ops(required_ops(resolved))


def _seed(seed: int, grid: Grid) -> None:
    """Another stream per data rank and stage, so that dropout masks differ between samples and between layers."""
    rank = grid.pp_rank * grid.dp_size + grid.dp_rank
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def _tokenizer(config: RunConfig, spec: ModelSpec | None, required: bool) -> Any:
    """The run's tokenizer; None where the data needs none and the checkpoint has none."""
    folder = config.model.tokenizer
    if folder is None and spec is not None and (required or _has_tokenizer(spec.folder)):
        folder = spec.folder
    return None if folder is None else load_tokenizer(config.model, folder)


def _has_tokenizer(folder: str) -> bool:
    return any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _loader_factory(
    resolved: ResolvedConfig, given: TrainerInputs, tokenizer: Any, spec: ModelSpec | None, grid: Grid
) -> LoaderFactory:
    """Knows the model's limits: its positions, and the rows of its embedding unless that will be grown."""
    model: Any = given.model
    if spec is not None:
        rows, positions = spec.vocab_size, spec.max_positions
    else:
        rows = model.get_input_embeddings().weight.shape[0] if hasattr(model, "get_input_embeddings") else None
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if resolved.config.model.resize_embeddings:
        rows = None
    return LoaderFactory(resolved.config, grid, tokenizer, given.data_collator, rows, positions)
