"""Applies a run's parallelism to its model: tensor parallelism first, then the pipeline's stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.stage_assignment import assign_layers, check_stages, num_stages, virtual_stages
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import ConfigErrors, ModelError
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.parallel.pipeline.deferred_linear import enable_deferred_weight_gradients
from ds_trainer.parallel.pipeline.split import split_into_stages
from ds_trainer.parallel.pipeline.stages import StagedModel
from ds_trainer.parallel.pipeline.trace_model import not_splittable
from ds_trainer.parallel.tensor.parallelize import split_model
from ds_trainer.parallel.tied_parameters import StageParameters
from ds_trainer.planning.pp_costs import FACTS, ModelParts, StageRanges
from ds_trainer.planning.pp_schedules import splits_backward, stages_of


def apply_parallelism(
    model: Any, resolved: ResolvedConfig, provenance: Provenance, max_positions: int | None, mesh: Mesh
) -> tuple[StagedModel | None, ModelSplit]:
    """Splits a model over the tensor-parallel ranks and leaves this rank's pipeline stages of it; in place.

    Args:
        model: The full model.
        resolved: The run's config.
        provenance: Which values of it the user has set.
        max_positions: Longest sequence that the model takes; None: any.
        mesh: Process groups.

    Returns:
        This rank's stages, None without a pipeline, and how parameters are sharded and assigned to stages.

    Raises:
        UserError: The model cannot be split as the config asks.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    parallel, grid = resolved.config.parallel, mesh.grid
    split = split_model(model, parallel, mesh)
    layout = (parallel.schedule, parallel.pp, virtual_stages(parallel))
    own = stages_of(*layout, grid.pp_rank)
    mesh.monitor.runs_stages(own, num_stages(parallel))
    if parallel.pp == 1:
        return None, split
    ranges = resolved.stages or _assign_unknown_layers(model, resolved, provenance, shapes, max_positions)
    owners = {stage: rank for rank in range(parallel.pp) for stage in stages_of(*layout, rank)}
    staged = split_into_stages(model, ranges, own, owners.__getitem__)
    _check_trained(trained, staged, parallel.pp)
    if splits_backward(parallel.schedule):
        enable_deferred_weight_gradients(model)
    stages = StageParameters(shapes, staged.owners, staged.replicas, grid.pp_rank, mesh.pp_group, mesh.pp_host_group)
    return staged, replace(split, stages=stages)


def _check_trained(trained: Iterable[str], staged: StagedModel, num_ranks: int) -> None:
    idle = sorted(set(range(num_ranks)) - {staged.owners[name] for name in trained})
    if idle:
        raise ModelError(
            f"pipeline rank {', '.join(map(str, idle))} of {num_ranks} has no parameter that requires a gradient",
            "each rank of a pipeline has an optimizer of its own",
            "set parallel.pp_split so that each rank has a layer that is trained, or parallel.pp to fewer ranks",
        )


def _assign_unknown_layers(
    model: Any,
    resolved: ResolvedConfig,
    provenance: Provenance,
    shapes: Mapping[str, tuple[int, ...]],
    max_positions: int | None,
) -> StageRanges:
    """The layers of every stage of a model whose layers were not known from a checkpoint's headers."""
    text = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    parts = ModelParts(shapes, {name: getattr(text, name) for name in FACTS if hasattr(text, name)})
    if not parts.num_layers:
        raise not_splittable(
            f"{type(model).__name__} has no layers with numbers", "stages are made of a language model's layers"
        )
    if faults := list(check_stages(resolved.config, provenance, parts.num_layers)):
        raise ConfigErrors(faults)
    return assign_layers(resolved.config, parts, max_positions)
