"""Which layers each stage of a pipeline gets, and how many elements a rank then holds. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.tp_rules import shares_of
from ds_trainer.errors import ConfigError
from ds_trainer.planning.checkpoint_spec import ModelSpec
from ds_trainer.planning.pp_costs import ModelParts, StageRanges
from ds_trainer.planning.pp_partition import partition, split_of
from ds_trainer.planning.pp_schedules import default_virtual_stages, schedule_problem, stages_of

_USUAL_POSITIONS = 2048
"""Used where `data.max_length` is not set: samples are usually much shorter than a model's longest sequence."""


def virtual_stages(parallel: ParallelConfig) -> int:
    """Stages on each rank."""
    return parallel.virtual_stages or default_virtual_stages(parallel.schedule)


def num_stages(parallel: ParallelConfig) -> int:
    """Stages of the pipeline."""
    return parallel.pp * virtual_stages(parallel)


def refused_stages(parallel: ParallelConfig) -> tuple[str, str, str] | None:
    """Found, rule and change where the schedule does not allow this number of stages per rank; None: it does."""
    microbatches = 4 * parallel.pp  # Every schedule takes so many, so that only the stages can be refused.
    return schedule_problem(parallel.schedule, parallel.pp, virtual_stages(parallel), microbatches)


def positions(config: RunConfig, max_positions: int | None) -> int:
    """The sequence length at which the costs of layers and head are compared.

    Args:
        config: The run.
        max_positions: Longest sequence of the model; None: it has no limit.
    """
    return config.data.max_length or min(_USUAL_POSITIONS, max_positions or _USUAL_POSITIONS)


def model_parts(spec: ModelSpec) -> ModelParts | None:
    """The embedding, layers and head of a checkpoint; None where its headers do not show them."""
    parts = ModelParts({name: tensor.shape for name, tensor in spec.distinct().items()}, spec.config)
    return parts if parts.num_layers else None


def check_stages(config: RunConfig, given: Provenance, num_layers: int) -> Iterator[ConfigError]:
    """A model with fewer layers than stages, or with another number of layers than `parallel.pp_split`."""
    parallel, stages = config.parallel, num_stages(config.parallel)
    if stages > num_layers:
        several = f" x {virtual_stages(parallel)} stages on each rank" if stages > parallel.pp else ""
        fewer = num_layers // parallel.pp
        change = f"set parallel.pp to {num_layers} or less"
        if fewer == 1:
            change = "set parallel.schedule to 1f1b, which has one stage on each rank"
        elif fewer > 1:
            change = f"set parallel.virtual_stages to {fewer} or less"
        yield ConfigError(
            f"{given.describe('parallel.pp')}{several}, and the model has {num_layers} "
            f"{'layers' if num_layers > 1 else 'layer'}",
            "each stage has one layer at least",
            change,
        )
    elif parallel.pp_split is not None and sum(parallel.pp_split) != num_layers:
        yield ConfigError(
            f"{given.describe('parallel.pp_split')}, {sum(parallel.pp_split)} layers, and the model has {num_layers}",
            "each layer is on one stage",
            f"set parallel.pp_split to {stages} numbers that add up to {num_layers}, or remove it",
        )


def assign_layers(config: RunConfig, parts: ModelParts, max_positions: int | None) -> StageRanges:
    """The layers of every stage: those of `parallel.pp_split`, or the split whose slowest stage is fastest.

    Args:
        config: A run that `check_stages` has nothing against.
        parts: The model.
        max_positions: Longest sequence of the model; None: it has no limit.
    """
    if config.parallel.pp_split is not None:
        return split_of(config.parallel.pp_split)
    return partition(parts.flops(positions(config, max_positions)), num_stages(config.parallel))


def sum_by_rank(parallel: ParallelConfig, of_stages: tuple[float, ...]) -> list[float]:
    """Sums over the stages that each pipeline rank holds."""
    held = (stages_of(parallel.schedule, parallel.pp, virtual_stages(parallel), rank) for rank in range(parallel.pp))
    return [sum(of_stages[stage] for stage in stages) for stages in held]


def tied_copy(config: RunConfig, spec: ModelSpec) -> int:
    """Elements of the embedding of which the rank of the last stage has a copy as its head; 0: it has none.

    A rank that has both stages has one parameter for both.
    """
    parallel, last = config.parallel, num_stages(config.parallel) - 1
    first_rank = stages_of(parallel.schedule, parallel.pp, virtual_stages(parallel), 0)
    if parallel.pp == 1 or not spec.tied or last in first_rank:
        return 0
    over_vocabulary = [prod(t.shape) for t in spec.distinct().values() if t.shape[:1] == (spec.vocab_size,)]
    return max(over_vocabulary, default=0)


def derive_stages(config: RunConfig, spec: ModelSpec | None) -> dict[str, tuple[Any, str]]:
    """Open values of the pipeline -> value and reason; empty where there is no pipeline, or it is refused.

    Args:
        config: A run that `check_stages` has nothing against.
        spec: The checkpoint; None where it is not known.
    """
    parallel = config.parallel
    if parallel.pp == 1 or refused_stages(parallel):
        return {}
    derived: dict[str, tuple[Any, str]] = {}
    if parallel.virtual_stages is None:
        derived["parallel.virtual_stages"] = (virtual_stages(parallel), f"what {parallel.schedule} has")
    parts = None if spec is None else model_parts(spec)
    if parallel.pp_split is None and spec is not None and parts is not None:
        ranges = assign_layers(config, parts, spec.max_positions)
        length = positions(config, spec.max_positions)
        of_stages = parts.flops(length).of_stages(ranges)
        above = max(of_stages) * len(of_stages) / sum(of_stages) - 1
        reason = f"the slowest stage, for which all wait, is {above:.0%} above the mean at {length} positions"
        derived["parallel.pp_split"] = (tuple(stop - start for start, stop in ranges), reason)
    return derived


def rank_elements(config: RunConfig, spec: ModelSpec, pp_split: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Elements of the model on the rank that holds most, and of the largest parameter on a rank.

    The copy of a tied parameter on another stage has no optimizer state and is not counted.

    Args:
        config: The run.
        spec: The checkpoint.
        pp_split: Layers of every stage; None: they are not known, or there is no pipeline.

    Returns:
        Both numbers; None where the headers do not show them.
    """
    tp, pp = config.parallel.tp, config.parallel.pp
    shards = shares_of(config, spec) if tp > 1 else None
    if spec.pickled or (tp > 1 and shards is None):
        return None
    full = {name: prod(tensor.shape) for name, tensor in spec.distinct().items()}
    elements = full if shards is None else shards.sizes(tp)
    parts = model_parts(spec)
    if pp_split is None or parts is None or len(pp_split) != num_stages(config.parallel):
        return -(-sum(elements.values()) // pp), spec.largest(elements)
    of_stages = parts.summed(elements).of_stages(split_of(pp_split))
    return int(max(sum_by_rank(config.parallel, of_stages))), spec.largest(elements)
