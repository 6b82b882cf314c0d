"""Sets a run up. The order in which parts are made and applied is stated here and nowhere else.

config -> rank grid -> process groups -> resolved config -> checkpoint -> checks of the machine -> tokenizer -> data
       -> model on meta -> tensor-parallel split -> pipeline stages -> loss -> engine: weights, optimizer -> executor
       -> check of the setup against the config

The process group comes first, so that whatever a rank finds wrong after it is every rank's error.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ds_trainer.callbacks.best_metric import require_evaluations
from ds_trainer.checkpoint.export import prove_export
from ds_trainer.checkpoint.folder import STATE
from ds_trainer.checkpoint.shard_reader import MasterWeights
from ds_trainer.config.accelerate.launcher_conflicts import check_accelerate_launch
from ds_trainer.config.deepspeed.rules import moments
from ds_trainer.config.path_rules import missing_trackers
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.rank_rules import check_ranks
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.data.consistency import check_same_dataset
from ds_trainer.data.loader_factory import LoaderFactory
from ds_trainer.data.prepare import read_chat_template
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.distributed.device import probe_machine
from ds_trainer.distributed.process_groups import Mesh, init_mesh
from ds_trainer.distributed.seed import seed_rank
from ds_trainer.distributed.store_barrier import barrier_after
from ds_trainer.engines.base import Engine, make_engine
from ds_trainer.engines.introspect import TORCH_DTYPES
from ds_trainer.errors import ConfigErrors
from ds_trainer.executors.make import make_executor
from ds_trainer.health.expected_wait import expected_wait
from ds_trainer.health.hang import Timeouts
from ds_trainer.host.deepspeed_ops import ensure_ops, required_ops
from ds_trainer.host.preflight import check_resources
from ds_trainer.launch import signals
from ds_trainer.launch.environment import grid_from_environment
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.log import get_logger, warn_once
from ds_trainer.models.build import build_model
from ds_trainer.models.source import find_model
from ds_trainer.models.tokenizer import find_tokenizer
from ds_trainer.models.weight_source import ModuleWeights
from ds_trainer.optim import hand_over, make_optimizer
from ds_trainer.parallel.apply import apply_parallelism
from ds_trainer.parallel.model_loss import make_model_loss
from ds_trainer.parallel.model_split import LocalWeights
from ds_trainer.run_folder import claimed
from ds_trainer.trainer.eval_samples import prompts_to_continue
from ds_trainer.trainer.inputs import TrainerInputs
from ds_trainer.trainer.parameter_groups import BuiltOptimizer, groups_of
from ds_trainer.trainer.resume_checks import check_layout, check_model, check_run, check_world, find_checkpoint
from ds_trainer.trainer.run import Run
from ds_trainer.trainer.setup_parts import BuiltModel, LoadedData, SetupPlan
from ds_trainer.trainer.verify_setup import verify_setup


def set_up(config: RunConfig, origins: dict[str, str], inputs: TrainerInputs) -> Run:
    """Makes every part of a run, in order.

    Args:
        config: The run's config, with open values.
        origins: Dotted key -> the place that set it, or `default`.
        inputs: The user's objects beside the config.

    Raises:
        UserError: Any fault of config, machine, data or model; on every rank the same one.
    """
    inputs.check(config)
    provenance = Provenance(config, origins)
    grid = grid_from_environment()
    if misfits := list(check_ranks(config, provenance, Machine(grid.world))):
        raise ConfigErrors(misfits)
    grid = replace(grid, tp_size=config.parallel.tp, pp_size=config.parallel.pp)
    machine = replace(probe_machine(grid.world, config.run.device), node_ranks=grid.local_world)
    mesh = init_mesh(grid, machine.device, Timeouts(config.run.stuck_timeout_s, config.run.collective_timeout_s))
    with mesh.monitor.guard():
        return _set_up_on(mesh, machine, config, origins, inputs)


def _set_up_on(mesh: Mesh, machine: Machine, config: RunConfig, origins: dict[str, str], inputs: TrainerInputs) -> Run:
    plan = _plan(mesh, machine, config, origins, inputs)
    with consensus(mesh, "the checks of the machine"):
        _check_before_loading(plan, mesh.grid)
    _stop_if_requested(mesh)
    seed_rank(config.run.seed, mesh.grid)
    data = _load_data(plan, inputs, mesh)
    built = _build_model(plan, data, inputs, mesh)
    export_dtype = TORCH_DTYPES[name] if (name := config.checkpoint.export_dtype) else plan.source.dtype()
    engine, optimizer = _start_engine(plan, built, inputs.optimizer, mesh)
    with consensus(mesh, "the check of the setup"):
        facts = verify_setup(plan.resolved, engine, optimizer, mesh)
        if plan.resumed is not None:
            check_layout(plan.resumed, plan.resolved, engine.parameter_layout(), mesh.grid.rank)
    _stop_if_requested(mesh)
    return Run(
        resolved=plan.resolved,
        mesh=mesh,
        model=built.model,
        tokenizer=data.tokenizer,
        loaders=data.loaders,
        engine=engine,
        loss=built.loss,
        executor=make_executor(engine, built.loss, mesh, built.staged, plan.resolved.config.parallel),
        train_loader=data.train_loader,
        eval_loader=data.eval_loader,
        eval_prompts=built.eval_prompts,
        facts=facts,
        export_dtype=export_dtype,
        data_probes=data.probes,
        num_trained=sum(map(prod, built.trained.values())),
        checkpoint=plan.resumed,
    )


def _plan(mesh: Mesh, machine: Machine, config: RunConfig, origins: dict[str, str], inputs: TrainerInputs) -> SetupPlan:
    """Resolves the config, and finds the model and the checkpoint."""
    with consensus(mesh, "the config"):
        source = find_model(config.model, inputs.model)
        resolved = resolve(config, origins, machine, source.spec, *source.sizes())
        if contradictions := check_accelerate_launch(os.environ, resolved):
            raise ConfigErrors(contradictions)
    trains = inputs.train_dataset is not None or config.data.train is not None
    return SetupPlan(resolved, Provenance(config, origins), source, find_checkpoint(resolved, mesh, trains))


def _check_before_loading(plan: SetupPlan, grid: Grid) -> None:
    """Checks that this machine can run the run, and compiles what it lacks."""
    resolved = plan.resolved
    if plan.resumed is not None:
        check_world(plan.resumed, resolved, grid.world)
    for text in resolved.warnings:
        warn_once(text)
    num_parameters, _ = plan.source.sizes()
    check_resources(resolved, num_parameters, grid)
    if grid.rank == 0:
        for missing in missing_trackers(resolved.config.logging):
            raise missing
        with claimed(Path(resolved.config.run.output_dir)):
            pass  # Reported before the model is loaded; locked from the first step on.
    with expected_wait():  # Another process may be compiling them.
        ensure_ops(required_ops(resolved))


def _load_data(plan: SetupPlan, inputs: TrainerInputs, mesh: Mesh) -> LoadedData:
    """Reads and tokenises the data, the same on every rank."""
    config, source = plan.resolved.config, plan.source
    with consensus(mesh, "the tokenizer"):
        folder = None if source.spec is None else source.spec.folder
        required = inputs.data_collator is None
        tokenizer: Any = inputs.processing_class or find_tokenizer(config.model, folder, required)
        if tokenizer is not None and config.data.chat_template is not None:
            tokenizer.chat_template = read_chat_template(config.data.chat_template)  # The export carries it too.
    with consensus(mesh, "the data"), barrier_after(mesh, "data preparation"):
        rows = None if config.model.resize_embeddings else source.vocab_size()  # Resized to the tokenizer.
        loaders = LoaderFactory(config, mesh.grid, tokenizer, inputs.data_collator, rows, source.max_positions())
        train_loader, eval_loader = loaders.train(inputs.train_dataset), loaders.eval(inputs.eval_dataset)
    _stop_if_requested(mesh)
    probes, _ = check_same_dataset(train_loader, mesh, "train"), check_same_dataset(eval_loader, mesh, "eval")
    return LoadedData(tokenizer, loaders, train_loader, eval_loader, probes)


def _build_model(plan: SetupPlan, data: LoadedData, inputs: TrainerInputs, mesh: Mesh) -> BuiltModel:
    """Builds the model without values and applies tensor and pipeline parallelism to it."""
    resolved, config, positions = plan.resolved, plan.resolved.config, data.loaders.max_positions
    with consensus(mesh, "the model"):
        if plan.resumed is not None and data.train_loader is not None:
            num_samples = data.train_loader.sampler.num_samples
            check_run(plan.resumed, resolved, plan.resumed.json(STATE), num_samples, data.probes)
        model, weights = build_model(config, inputs.model, plan.source.spec, data.tokenizer)
        if data.train_loader is not None:
            require_evaluations(config, data.eval_loader is not None)
            if config.checkpoint.export and mesh.grid.rank == 0:
                prove_export(model)
        eval_prompts = prompts_to_continue(config.evaluation, data.eval_loader, model, data.tokenizer, positions)
        trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        staged, split = apply_parallelism(model, resolved, plan.provenance, positions, mesh)
        loss = make_model_loss(model, split, staged, config, inputs.compute_loss_func, mesh)
        if plan.checkpoint is not None:
            check_model(plan.checkpoint, trained)
    if isinstance(weights, ModuleWeights):
        mesh.broadcast_over_world(weights.values.values())
    if plan.checkpoint is not None:
        with consensus(mesh, "the weights of the checkpoint"):
            weights = MasterWeights(plan.checkpoint.shards(), weights)
    return BuiltModel(model, weights, trained, staged, split, loss, eval_prompts)


def _start_engine(
    plan: SetupPlan, built: BuiltModel, optimizer: torch.optim.Optimizer | None, mesh: Mesh
) -> tuple[Engine, BuiltOptimizer]:
    """The engine with the model's values in place and the optimizer around them, and that optimizer as it was built."""
    model, split = built.model, built.split
    engine = make_engine(plan.resolved, mesh)
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    engine.load(model, LocalWeights(built.weights, split), split)
    if optimizer is not None:
        hand_over(optimizer, parameters, dict(model.named_parameters()))
    made = BuiltOptimizer(moments(plan.resolved.config) if optimizer is None else None)

    def build(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        of_run = make_optimizer(named, shapes, plan.resolved, optimizer)
        made.groups = groups_of(of_run, named, built.trained)
        return of_run

    engine.wrap(build)
    engine.module.train()
    return engine, made


def _stop_if_requested(mesh: Mesh) -> None:
    """Ends a run that a signal stops before its first step; there is nothing to save."""
    if agree(mesh, "set-up").stop:
        get_logger().warning("stopped before the first step (exit code %d)", signals.EXIT_CODE)
        signals.forget()
        raise signals.StopRequested
