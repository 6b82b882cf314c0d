"""Puts a run together. The order in which parts are made and applied is stated here and nowhere else.

config -> grid -> resolve -> machine checks -> mesh -> data -> skeleton -> weights -> engine -> optimizer -> asked = got
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_trainer.asked_got import check_asked_is_got
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.data.loader import BatchLoader, pad_collate, padding_id
from ds_trainer.data.prepare import prepare, read_chat_template
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.data.tokenized import preview
from ds_trainer.engines.base import Engine, EngineFacts, make_engine
from ds_trainer.engines.dtypes import TORCH_DTYPES
from ds_trainer.errors import ConfigError, ModelError
from ds_trainer.log import get_logger, warn_once
from ds_trainer.loss import CausalLMLoss, LossFunction, ModelOwnLoss, UserLoss
from ds_trainer.mesh.agree import agreed
from ds_trainer.mesh.device import probe_machine
from ds_trainer.mesh.grid import Grid
from ds_trainer.mesh.mesh import Mesh, grid_from_environment, init_mesh
from ds_trainer.mesh.ops import ensure_ops, required_ops
from ds_trainer.mesh.preflight import check_machine
from ds_trainer.models.hf import build_skeleton, is_causal_lm, load_tokenizer, prepare_for_training
from ds_trainer.models.hub import resolve_folder
from ds_trainer.models.resize import fit_embeddings
from ds_trainer.models.source import WeightSource
from ds_trainer.models.spec import ModelSpec, read_spec
from ds_trainer.models.weights import CheckpointWeights
from ds_trainer.optim import build_optimizer, parameter_groups


@dataclass(frozen=True)
class Ingredients:
    """What the user handed to `Trainer`, beside the config."""

    model: nn.Module | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    data_collator: Callable | None = None
    compute_loss_func: Callable | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Run:
    """A run that is ready to take its first step."""

    resolved: ResolvedConfig
    mesh: Mesh
    model: nn.Module
    tokenizer: Any
    engine: Engine
    loss: LossFunction
    train_loader: BatchLoader | None
    eval_loader: BatchLoader | None
    facts: EngineFacts
    export_dtype: torch.dtype
    """Format of the exported weights: the config's, or that of the checkpoint or instance the run began with."""


def assemble(config: RunConfig, origins: dict[str, str], given: Ingredients) -> Run:
    """Makes every part of a run, in order.

    Raises:
        UserError: Any fault of config, machine, data or model; on every rank the same one.
    """
    grid = grid_from_environment()
    machine = probe_machine(grid.world, config.run.device)
    spec = None if given.model is not None else _read_spec(config)
    sizes = _sizes(spec, given.model)
    resolved = resolve(config, origins, machine, spec, *sizes)
    mesh = init_mesh(grid, machine.device)
    with agreed(mesh):
        _check_before_loading(resolved, sizes[0], grid)
    _seed(config.run.seed, grid.rank)
    with agreed(mesh):
        tokenizer = given.processing_class or _tokenizer(config, spec, required=given.data_collator is None)
        if tokenizer is not None and config.data.chat_template is not None:
            tokenizer.chat_template = read_chat_template(config.data.chat_template)  # The export carries it too.
    with agreed(mesh):
        train_loader, eval_loader = _loaders(resolved, given, tokenizer, spec, mesh)
    with agreed(mesh):
        model, weights = _skeleton(resolved, given.model, spec, tokenizer)
        loss = _loss(resolved, model, given.compute_loss_func)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    export_dtype = _export_dtype(config, given.model, spec)
    engine = make_engine(resolved, mesh)
    engine.load(model, weights)
    engine.wrap(lambda named: _optimizer(named, shapes, resolved, given.optimizer))
    engine.module.train()
    facts = check_asked_is_got(resolved, engine, mesh)
    return Run(resolved, mesh, model, tokenizer, engine, loss, train_loader, eval_loader, facts, export_dtype)


def _read_spec(config: RunConfig) -> ModelSpec:
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set and no model was handed to Trainer",
            "a run trains one checkpoint",
            "set model.path to a checkpoint's folder or hub id, or pass Trainer(model=...)",
        )
    return read_spec(resolve_folder(config.model.path, config.model.revision))


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
    check_machine(resolved, num_parameters, grid)
    ensure_ops(required_ops(resolved))


def _seed(seed: int, rank: int) -> None:
    """Another stream per rank, so that dropout masks differ between samples on different ranks."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def _tokenizer(config: RunConfig, spec: ModelSpec | None, required: bool) -> Any:
    """The run's tokenizer; None where the data needs none and the checkpoint has none."""
    if config.model.tokenizer is None and (spec is None or not (required or _has_tokenizer(spec.folder))):
        return None
    return load_tokenizer(config.model, spec.folder if spec else config.model.tokenizer)


def _has_tokenizer(folder: str) -> bool:
    return any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _loaders(
    resolved: ResolvedConfig, given: Ingredients, tokenizer: Any, spec: ModelSpec | None, mesh: Mesh
) -> tuple[BatchLoader | None, BatchLoader | None]:
    config = resolved.config
    train = _dataset(given.train_dataset, config.data.train, "train", resolved, given, tokenizer, spec)
    held_out = _dataset(given.eval_dataset, config.data.eval, "eval", resolved, given, tokenizer, spec)
    batch, ranks, rank = config.batch, mesh.grid.dp_size, mesh.grid.dp_rank
    assert batch.global_size is not None and batch.micro_size is not None
    collate = given.data_collator or (lambda features: pad_collate(features, padding_id(tokenizer)))
    limits = _limits(resolved, spec, given.model)
    train_loader = eval_loader = None
    if train is not None:
        sampler = GlobalBatchSampler(
            len(train), batch.global_size, batch.micro_size, rank, ranks, config.run.seed, config.data.shuffle
        )
        train_loader = BatchLoader(train, sampler, collate, **limits)
    if held_out is not None:
        size = config.evaluation.batch_size or batch.micro_size
        order = GlobalBatchSampler(len(held_out), size * ranks, size, rank, ranks, shuffle=False)
        eval_loader = BatchLoader(held_out, order, collate, **limits)
    return train_loader, eval_loader


def _dataset(
    handed: Any,
    paths: Any,
    what: str,
    resolved: ResolvedConfig,
    given: Ingredients,
    tokenizer: Any,
    spec: ModelSpec | None,
) -> Any:
    """The samples of one split: a data set with a collator of its own as it is, everything else tokenised."""
    source = paths if handed is None else handed
    if source is None or (handed is not None and given.data_collator is not None):
        return source
    config = resolved.config.data
    dataset = prepare(source, tokenizer, config, **_limits(resolved, spec, given.model), what=what)
    get_logger().info("data.%s: %s", what, dataset.stats)
    if what == "train" and config.preview_samples:
        get_logger().info("%s", preview(dataset, tokenizer, config.preview_samples))
    return dataset


def _limits(resolved: ResolvedConfig, spec: ModelSpec | None, model: Any) -> dict[str, int | None]:
    """What a batch must keep to: the model's positions, and the rows of the embedding unless it will be grown."""
    if spec is not None:
        rows, positions = spec.vocab_size, spec.max_positions
    else:
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        rows = None if embedding is None else embedding.weight.shape[0]
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return {"vocab_size": None if resolved.config.model.resize_embeddings else rows, "max_positions": positions}


def _skeleton(
    resolved: ResolvedConfig, instance: nn.Module | None, spec: ModelSpec | None, tokenizer: Any
) -> tuple[nn.Module, WeightSource | None]:
    """The model to train, and where its values come from; None where an instance holds them."""
    config = resolved.config.model
    weights: WeightSource | None = None
    if instance is None:
        assert spec is not None
        model: nn.Module = build_skeleton(spec.folder, config, torch.float32)
        weights = CheckpointWeights(spec.folder, model, config.allow_pickle)
    else:
        model = instance
        if hasattr(model, "config"):
            prepare_for_training(model, config)
    if tokenizer is not None and hasattr(model, "get_input_embeddings"):
        weights = fit_embeddings(model, tokenizer, weights, config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"no parameter of {type(model).__name__} requires a gradient",
            "a run trains at least one parameter",
            "set requires_grad on the parameters to train before Trainer(model=...)",
        )
    return model, weights


def _loss(resolved: ResolvedConfig, model: nn.Module, function: Callable | None) -> LossFunction:
    smoothing = resolved.config.loss.label_smoothing
    causal = is_causal_lm(model)
    base: LossFunction = CausalLMLoss(smoothing) if causal else ModelOwnLoss()
    if function is not None:
        if smoothing:
            raise ConfigError(
                f"loss.label_smoothing is {smoothing} and a compute_loss_func was handed to Trainer",
                "a loss function of your own decides about smoothing itself",
                "set loss.label_smoothing to 0 and smooth inside compute_loss_func",
            )
        return UserLoss(function, counts_like=base)
    if smoothing and not causal:
        raise ConfigError(
            f"loss.label_smoothing is {smoothing} and {type(model).__name__} computes its own loss",
            "smoothing is applied to the cross entropy of causal language models",
            "set loss.label_smoothing to 0, or pass Trainer(compute_loss_func=...)",
        )
    if not causal:
        warn_once(
            f"{type(model).__name__} computes its own loss: it is taken as the mean over labels other than -100, "
            "which is what transformers' models return"
        )
    return base


def _optimizer(
    named: list[tuple[str, nn.Parameter]],
    shapes: dict[str, torch.Size],
    resolved: ResolvedConfig,
    given: torch.optim.Optimizer | None,
) -> torch.optim.Optimizer:
    if given is None:
        return build_optimizer(parameter_groups(named, shapes, resolved.config.optimizer), resolved)
    theirs = {id(p) for group in given.param_groups for p in group["params"]}
    strangers = len(theirs - {id(p) for _, p in named})
    left_out = [name for name, p in named if id(p) not in theirs]
    if strangers or left_out:
        raise ConfigError(
            f"the optimizer handed to Trainer updates {strangers} tensors that are not parameters of the model, and "
            f"leaves out {len(left_out)} trainable ones{': ' + ', '.join(left_out[:5]) if left_out else ''}",
            "an optimizer updates exactly the model's trainable parameters",
            "build it on the model instance handed to Trainer(model=...), and freeze what it should not update",
        )
    return given
