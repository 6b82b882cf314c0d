"""Which parameters an optimizer updates alike: by which learning rate, with which weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from ds_trainer.errors import EngineError


@dataclass(frozen=True)
class GroupFacts:
    """One parameter group.

    Args:
        lr: Peak learning rate.
        weight_decay: Weight decay.
        num_tensors: Parameters in it.
        num_elements: Their elements in the full model.
    """

    lr: float
    weight_decay: float
    num_tensors: int = 0
    num_elements: int = 0

    @property
    def rates(self) -> tuple[float, float]:
        """Learning rate and weight decay."""
        return self.lr, self.weight_decay


@dataclass
class BuiltOptimizer:
    """An optimizer as it was built, before an engine flattens or shards what it updates.

    Args:
        num_moments: Tensors of a parameter's size and dtype that it keeps; None: it is the user's own.
        groups: Its parameter groups.
    """

    num_moments: int | None
    groups: list[GroupFacts] = field(default_factory=list)


def groups_of(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    shapes: Mapping[str, Sequence[int]],
) -> list[GroupFacts]:
    """The parameter groups of an optimizer.

    Args:
        optimizer: The optimizer.
        named: Its parameters by their names in the model.
        shapes: Their full shapes by name.
    """
    names = {id(parameter): name for name, parameter in named}
    groups = []
    for group in optimizer.param_groups:
        sizes = [prod(shapes[names[id(parameter)]]) for parameter in group["params"]]
        groups.append(GroupFacts(*rates_of(group), len(sizes), sum(sizes)))
    return groups


def rates_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """Learning rate and weight decay of one of an optimizer's `param_groups`."""
    return float(group["lr"]), float(group.get("weight_decay", 0.0))


def check_groups(built: Sequence[GroupFacts], live: Sequence[tuple[float, float]], rank: int) -> None:
    """Checks that an engine's optimizer updates by the rates of the groups that it was given.

    Args:
        built: The groups as they were built.
        live: `rates_of` each group of the optimizer that runs.
        rank: This rank.

    Raises:
        EngineError: It has other groups, or other rates.
    """
    asked, got = ([_rate_text(*rates) for rates in each] for each in ([g.rates for g in built], live))
    if asked != got:
        raise EngineError(
            f"rank {rank}: the parameter groups are {'; '.join(asked)}, and the engine set up {'; '.join(got)}",
            "a run is set up as its config says",
            "report this with the run's JSON; optimizer.lr and optimizer.weight_decay are what the engine was given",
        )


def describe_groups(of_ranks: Iterable[Sequence[GroupFacts]]) -> str:
    """Groups as text, those of pipeline stages with the same rates put together.

    Args:
        of_ranks: The groups of each rank of a pipeline.
    """
    merged: dict[tuple[float, float], tuple[int, int]] = {}
    for groups in of_ranks:
        for group in groups:
            tensors, elements = merged.get(group.rates, (0, 0))
            merged[group.rates] = tensors + group.num_tensors, elements + group.num_elements
    return "; ".join(
        f"{tensors} tensors of {elements:,} elements, {_rate_text(*rates)}"
        for rates, (tensors, elements) in merged.items()
    )


def _rate_text(lr: float, weight_decay: float) -> str:
    return f"lr {lr:g}, weight decay {weight_decay:g}"
