"""Checks of `parallel.tp_plan` against a checkpoint's names and shapes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ds_trainer.config.model_rules import names_are_the_models
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.planning.checkpoint_spec import ModelSpec
from ds_trainer.planning.tp_plan import TensorPlan, generic
from ds_trainer.planning.tp_shards import COLUMN, EMBEDDING, ROW, TensorShards

_SHOWN = 8


def check_plan(config: RunConfig, given: Provenance, shards: TensorShards) -> Iterator[ConfigError]:
    """Entries that match nothing, or whose style does not fit the module; only where the model's names are known."""
    spec, override = shards.spec, shards.plan.override
    if not override or not names_are_the_models(config, spec):
        return
    place = given.origin("parallel.tp_plan")
    names = _names(shards)
    # A module without weights is not in the checkpoint, and the head's name of a tied model without a plan is unknown.
    sure = [entry for entry in _unmatched(shards, names) if _shards(override[entry]) and not _may_be_tied(spec)]
    if sure:
        yield ConfigError(
            f"parallel.tp_plan ({place}) has {', '.join(sure)}, which matches no module or parameter of the checkpoint",
            "each entry of parallel.tp_plan names modules, with * for any part of a name",
            f"use names such as {', '.join(matrices(spec)[:4])}",
        )
    misfits = list(_misfits(shards.plan, spec, names))
    for entry, name, what in misfits:
        yield ConfigError(
            f"parallel.tp_plan ({place}) gives {override[entry]} to {name} by {entry}, and that is {what}",
            "each style fits some kinds of layers, such as Linear and Conv1D, or Embedding",
            "give it another style in parallel.tp_plan, or `replicate`",
        )
    if not sure and not misfits and not _may_be_tied(spec) and not shards.shards_anything:
        yield ConfigError(
            f"parallel.tp_plan ({place}) shards no layer, and {given.describe('parallel.tp')}",
            "without a sharded layer every rank would train the same full model",
            "give layers a style that shards them, or set parallel.tp to 1",
        )


def plan_warnings(config: RunConfig, shards: TensorShards) -> Iterator[str]:
    """Entries that can be matched against the model at load only."""
    spec = shards.spec
    if spec.pickled or spec.family is None:
        return  # The plan cannot be checked, and another warning says so.
    known = names_are_the_models(config, spec)
    names = _names(shards) | ({} if known else dict.fromkeys(shards.plan.styles))
    override = shards.plan.override
    sure = known and not _may_be_tied(spec)
    open_ = [entry for entry in _unmatched(shards, names) if not (sure and _shards(override[entry]))]
    if open_:
        yield (
            f"parallel.tp_plan has {', '.join(open_)}, which matches no name in the checkpoint: whether it matches one "
            "of the model is checked at load"
        )


def matrices(spec: ModelSpec) -> list[str]:
    """Layers of the checkpoint's blocks that have matrices, every number as `*`."""
    modules = (name.removesuffix(".weight") for name, tensor in spec.tensors.items() if len(tensor.shape) == 2)
    return list(dict.fromkeys(generic(name) for name in modules if re.search(r"\.\d+\.", name)))


def suggested(spec: ModelSpec) -> str:
    """How to write a plan for a model that has none, by the names of its layers."""
    found = matrices(spec)
    named = f": {', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''}" if found else ""
    return (
        'set parallel.tp_plan, with "colwise" for every layer that an attention or MLP begins with (all of query, key '
        f'and value) and "rowwise" for the one that ends it{named}'
    )


def _names(shards: TensorShards) -> dict[str, None]:
    """Every module and parameter of the checkpoint, also with the model's prefix, and a tied head."""
    found: dict[str, None] = {}
    for tensor in shards.spec.tensors:
        parts = tensor.split(".")
        found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    prefixed = dict.fromkeys(f"{prefix}{name}" for prefix in shards.prefixes for name in found)
    heads = [entry for entry in shards.plan.styles if "*" not in entry] if shards.spec.tied else []
    return prefixed | dict.fromkeys(heads)


def _unmatched(shards: TensorShards, names: dict[str, None]) -> list[str]:
    return TensorPlan({}, shards.plan.override).unmatched(names)


def _misfits(plan: TensorPlan, spec: ModelSpec, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Entry, the first module that does not fit its style, and what that module is."""
    reported = set()
    modules = {name.rpartition(".")[0] for name in names}
    holders = {name.rpartition(".")[0] for name in modules}
    for name in names:
        entry = plan.entry_of(name)
        if entry is None or entry in reported or not _shards(plan.override[entry]):
            continue
        weight = next((spec.tensors[own] for own in _own_names(f"{name}.weight") if own in spec.tensors), None)
        if weight is not None and len(weight.shape) != 2:
            what = f"no matrix: its weight is {list(weight.shape)}"
        elif name in holders and plan.override[entry] not in EMBEDDING:
            what = "a module that holds others"
        else:
            continue
        reported.add(entry)
        yield entry, name, what


def _own_names(name: str) -> tuple[str, str]:
    """A name in the checkpoint, which may lack the prefix that the class for language models adds."""
    return name, name.partition(".")[2]


def _shards(style: str) -> bool:
    return style in (*COLUMN, *ROW, *EMBEDDING)


def _may_be_tied(spec: ModelSpec) -> bool:
    """Whether the model has a tied head whose name neither checkpoint nor plan shows."""
    return spec.tied and not (spec.family and spec.family.tp_plan)
