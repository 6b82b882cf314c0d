"""Applies a tensor-parallel plan to a Hugging Face model: replaces its layers by parallel ones."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import ModelError
from ds_trainer.log import get_logger
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.parallel.tensor.column_linear_group import ColumnGroup
from ds_trainer.parallel.tensor.dropout import draw_masks_per_rank, has_dropout
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear
from ds_trainer.parallel.tensor.plan_checks import check_tied, check_user_plan, report_misfits_of_first_forward
from ds_trainer.parallel.tensor.sequence_parallel import shard_sequences
from ds_trainer.parallel.tensor.splitter import Splitter
from ds_trainer.parallel.tensor.styles import STYLES, embedding_rowwise
from ds_trainer.planning.checkpoint_spec import families
from ds_trainer.planning.tp_plan import TensorPlan, generic, plan_for


def split_model(model: nn.Module, config: ParallelConfig, mesh: Mesh) -> ModelSplit:
    """Shards a model in place; without tensor parallelism it stays as it is.

    The model keeps its class, its code and its config, and its parameters their names. Layers that the plan names are
    replaced, attention modules are reduced to this rank's heads, and what the plan does not name is not sharded.

    Args:
        model: On meta, or with values; each sharded parameter is replaced by a new one, on meta, of its local shape.
        config: The config's parallel section.
        mesh: Process groups.

    Returns:
        How each parameter was sharded.

    Raises:
        ModelError: There is no plan for the model, it shards nothing, an entry of it matches nothing or does not fit,
            or a size does not divide.
    """
    if config.tp == 1:
        return ModelSplit()
    plan = _plan(model, config)
    splitter = Splitter(model, mesh.tp_group)
    _apply(plan, splitter)
    splitter.finish()
    _make_head_parallel(model, plan, splitter)
    _group_columns(model, splitter, config.keep_gathered_input)
    dropout = has_dropout(model)
    if dropout:
        draw_masks_per_rank(model, mesh.tp_group)
    if config.sequence_parallel:
        shard_sequences(splitter, own_masks=dropout)
    shardings = splitter.shardings()
    split = ModelSplit(shardings, mesh.grid.tp_rank, mesh.tp_host_group, _whole_modules(model, shardings))
    _log_split(split, model)
    if plan.override:
        report_misfits_of_first_forward(model, plan)
        get_logger().warning(
            "parallel.tp_plan has entries: that a user-defined plan computes what the model does is not verified; "
            "compare the losses of a few steps with a run with parallel.tp = 1"
        )
    return split


def _plan(model: nn.Module, config: ParallelConfig) -> TensorPlan:
    """The plan of the model's type, or, of a type that is not in the table, that of its class."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    plan = plan_for(model_type, config.tp_plan)
    if (plan is None or not plan.styles) and model_type not in families():
        own = getattr(model, "tp_plan", None) if isinstance(model, PreTrainedModel) else None
        if own:
            plan = TensorPlan(dict(own), config.tp_plan or {})
    if plan is None:
        raise ModelError(
            f"parallel.tp is {config.tp} and there is no plan for {type(model).__name__}",
            "a plan says which layers are sharded and how; without one every rank would hold the full model",
            'set parallel.tp to 1, or give one in parallel.tp_plan, such as {"model.layers.*.mlp.up_proj": "colwise", '
            '"model.layers.*.mlp.down_proj": "rowwise"}',
        )
    return plan


def _apply(plan: TensorPlan, splitter: Splitter) -> None:
    targets: dict[str, Any] = {**dict(splitter.model.named_modules()), **dict(splitter.model.named_parameters())}
    del targets[""]  # The model itself, which `*` would match.
    # Plans of transformers have entries for modules that only some models of a type have.
    if unmatched := [entry for entry in plan.unmatched(targets) if entry in plan.override]:
        raise ModelError(
            f"parallel.tp_plan has {', '.join(unmatched)}, which matches no module or parameter of "
            f"{type(splitter.model).__name__}",
            "each entry of parallel.tp_plan names modules, with * for any part of a name",
            f"use names such as {', '.join(_examples(splitter.model))}",
        )
    styles = {name: style for name in targets if (style := plan.style_of(name)) is not None}
    if unknown := set(styles.values()) - set(STYLES):
        raise ModelError(
            f"the plan of {type(splitter.model).__name__} has the style(s) {', '.join(sorted(unknown))}",
            f"styles are {', '.join(sorted(STYLES))}",
            "give the modules another style in parallel.tp_plan",
        )
    check_tied(plan, splitter.model)
    for name, style in styles.items():
        _apply_style(plan, splitter, name, style, targets[name])
    if not splitter.has_sharded:
        raise ModelError(
            f"no entry of the plan {'shards' if styles else 'matches'} a module of {type(splitter.model).__name__}",
            "every rank would hold the full model",
            "set parallel.tp to 1, or give a plan in parallel.tp_plan that shards layers, with names such as "
            f"{', '.join(_examples(splitter.model))}",
        )
    check_user_plan(plan, targets, splitter.model)


def _apply_style(plan: TensorPlan, splitter: Splitter, name: str, style: str, target: Any) -> None:
    try:
        STYLES[style](splitter, name, target)
    except ModelError as error:
        entry = plan.entry_of(name)
        if entry is None:
            raise
        found = f'{error.found} (entry "{entry}" of parallel.tp_plan)'
        raise ModelError(found, error.rule, error.change) from error


def _examples(model: nn.Module) -> list[str]:
    """Some names that a plan may hold."""
    names = dict.fromkeys(generic(name) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return list(names)[:4]


def _make_head_parallel(model: Any, plan: TensorPlan, splitter: Splitter) -> None:
    """Returns full logits to callers of a column-parallel head; shards an embedding without a style like the head.

    Tied or not: the embedding is as large as the head, and a tied one is the same parameter.
    """
    if not isinstance(model, PreTrainedModel):
        return
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if not isinstance(head, ColumnParallelLinear):
        return
    head.gather_output = True
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    if name is not None and plan.style_of(name) is None and isinstance(embedding, nn.Embedding):
        embedding_rowwise(splitter, name, embedding)


def _group_columns(model: nn.Module, splitter: Splitter, keep_gathered_input: bool) -> None:
    """Layers of one module that read inputs of one size are computed together, while they are called so."""
    for module in model.modules():
        by_inputs = defaultdict(list)
        for child in module.children():
            if isinstance(child, ColumnParallelLinear) and not isinstance(module, nn.ModuleList):
                by_inputs[child.in_features].append(child)
        for members in by_inputs.values():
            ColumnGroup(members, splitter.group).keep_gathered_input = keep_gathered_input


def _log_split(split: ModelSplit, model: nn.Module) -> None:
    """Logs in one line what is sharded, and what is not."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    full = sum(prod(split.shardings[name].shape) if name in split.shardings else size for name, size in sizes.items())
    get_logger().info(
        "tensor parallel: each rank holds %.0f%% of the parameters; whole on every one: %s",
        100 * sum(sizes.values()) / full,
        ", ".join(split.whole_modules) or "none",
    )


def _whole_modules(model: nn.Module, shardings: dict[str, Any]) -> tuple[str, ...]:
    """Modules with unsharded parameters, the numbers of layers as `*`."""
    names = (name.rpartition(".")[0] for name, _ in model.named_parameters() if name not in shardings)
    return tuple(dict.fromkeys(generic(name) for name in names))
