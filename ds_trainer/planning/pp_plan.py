"""Pipeline plans: which modules of a model type lie before its layers, and which after them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.planning.checkpoint_spec import families


@dataclass(frozen=True)
class StagePlan:
    """Where a model can be split into stages: between any two of its layers.

    Names are those of the class for causal language models. What neither `first` nor `last` names, such as rotary
    embeddings, has no parameters, and every stage has it.

    Args:
        layers: The list of layers, of which each stage has a range.
        first: Modules used before the layers, which the first stage has.
        last: Modules used after the layers, the head among them, which the last stage has.
    """

    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]


def stage_plan(model_type: str) -> StagePlan | None:
    """The plan of a model type, as `families.json` has it.

    Args:
        model_type: `model_type` of the model's config.

    Returns:
        None: the type cannot be split, see `pp_unsupported_reason`, or the table does not know it.
    """
    family = families().get(model_type)
    if family is None or family.pp_plan is None:
        return None
    plan = family.pp_plan
    return StagePlan(plan["layers"], tuple(plan["first"]), tuple(plan["last"]))


def pp_unsupported_reason(model_type: str) -> str | None:
    """Why a model type cannot be split into stages, as `families.json` has it; None where it can, or is not known."""
    family = families().get(model_type)
    return None if family is None else family.pp_refused
