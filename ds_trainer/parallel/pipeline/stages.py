"""Reduces a model in place to the stages of one rank of a pipeline.

The model stays one object of its class, with the modules of this rank's stages under the names that they have in the
full model. Layers of other stages are absent from its list of layers. Every other module with parameters that another
stage has is replaced by a `Placeholder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_trainer.models.transformer_blocks import has_parameters
from ds_trainer.parallel.pipeline.stage_forward import (
    Placeholder,
    SpareSlot,
    StageContext,
    StageLayers,
    run_by_stages,
)
from ds_trainer.parallel.pipeline.trace_model import ModelTrace, not_splittable
from ds_trainer.parallel.tensor.sequence_parallel import stack_of
from ds_trainer.planning.pp_costs import StageRanges


@dataclass(frozen=True)
class StagedModel:
    """What one rank has of a model that is split into stages.

    Args:
        stages: Its stages, in order.
        shapes: Every parameter's name in the order of the full model (a tied one's first name) -> its shape on this
            tensor-parallel rank.
        owners: Every parameter's name -> the pipeline rank that owns it.
        replicas: Of parameters that further pipeline ranks have a replica of: name -> these ranks.
        modules: Stage -> its modules with parameters.
    """

    stages: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, int]
    replicas: Mapping[str, tuple[int, ...]]
    modules: Mapping[int, tuple[nn.Module, ...]]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters that run in a stage, replicas included."""
        return list(dict.fromkeys(p for module in self.modules[stage] for p in module.parameters()))

    def hidden_length(self, positions: int) -> int:
        """Positions of the hidden states between stages on this rank.

        Args:
            positions: Those of the full sequence.
        """
        stack = next(filter(None, map(stack_of, self.modules[self.stages[0]])), None)
        return positions if stack is None else stack.own_length(positions)


def build_stages(
    model: PreTrainedModel, trace: ModelTrace, ranges: StageRanges, own: Sequence[int], owner_of: Callable[[int], int]
) -> StagedModel:
    """Reduces a model of a class that has been traced; see `ds_trainer.parallel.pipeline.split.split_into_stages`."""
    layers: Any = model.get_submodule(trace.plan.layers)
    units = _units(model, trace, ranges)
    staged = _staged(model, units, own, owner_of)
    context, spare = StageContext(), []
    held = {parameter for stage in own for parameter in staged.parameters_of(stage)}
    for unit in units:
        if unit.is_layer or (unit.stage in own and unit.stage > 0):
            continue
        # A tied parameter keeps the name that it has in the full model, though the module of that name is not here.
        named = unit.module.named_parameters()
        replicas = {n: p for n, p in named if p in held and f"{unit.name}.{n}" in staged.owners}
        places = [(parent, n) for parent in model.modules() for n, m in parent.named_children() if m is unit.module]
        if unit.stage in own:
            spare += [SpareSlot(parent, n, Placeholder(unit.module, context, {})) for parent, n in places]
        else:
            for parent, attribute in places:
                setattr(parent, attribute, Placeholder(unit.module, context, replicas))
    own_layers = {number for stage in own for number in range(*ranges[stage])}
    StageLayers.restrict(layers, own_layers, context, trace.outputs)
    run_by_stages(model, context, ranges, spare)
    return staged


@dataclass(frozen=True)
class _Unit:
    """A layer, or a module outside of the layers that has parameters of its own.

    Args:
        name: Its name.
        module: The module.
        stage: The stage that has it.
        is_layer: Whether it is a layer.
    """

    name: str
    module: nn.Module
    stage: int
    is_layer: bool


def _units(model: PreTrainedModel, trace: ModelTrace, ranges: StageRanges) -> list[_Unit]:
    """All of a model's units, in its order."""
    plan = trace.plan
    stages = {f"{plan.layers}.{i}": stage for stage, bounds in enumerate(ranges) for i in range(*bounds)}
    found: list[_Unit] = []
    for name, module in model.named_modules():
        if any(_is_in(name, unit.name) for unit in found):
            continue
        if name in stages:
            found.append(_Unit(name, module, stages[name], True))
        elif has_parameters(module):
            is_first, is_last = (any(_is_in(name, n) for n in names) for names in (plan.first, plan.last))
            if not (is_first or is_last):
                raise not_splittable(
                    f"{type(model).__name__} has parameters in {name or 'itself'}, which small models of its class "
                    "do not have, or do not call",
                    "what is in no layer is known to run before the layers or after them",
                )
            found.append(_Unit(name, module, 0 if is_first else len(ranges) - 1, False))
    return found


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _staged(
    model: PreTrainedModel, units: list[_Unit], own: Sequence[int], owner_of: Callable[[int], int]
) -> StagedModel:
    last = max(unit.stage for unit in units)
    users: dict[nn.Parameter, set[int]] = {}
    for unit in units:
        for parameter in unit.module.parameters():
            users.setdefault(parameter, set()).add(unit.stage)
    of_layers = {parameter for unit in units if unit.is_layer for parameter in unit.module.parameters()}
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if len(users[parameter]) > 1 and (users[parameter] != {0, last} or parameter in of_layers):
            raise not_splittable(
                f"{name} is shared by stages {', '.join(map(str, sorted(users[parameter])))} of {last + 1}",
                "what is before the layers and what is after them may share a parameter, as embedding and head do",
            )
    ranks = {name: [owner_of(stage) for stage in sorted(users[parameter])] for name, parameter in named.items()}
    return StagedModel(
        tuple(own),
        {name: tuple(parameter.shape) for name, parameter in named.items()},
        {name: first for name, (first, *_) in ranks.items()},
        {name: (others[-1],) for name, (first, *others) in ranks.items() if others and others[-1] != first},
        {stage: tuple(unit.module for unit in units if unit.stage == stage) for stage in own},
    )
