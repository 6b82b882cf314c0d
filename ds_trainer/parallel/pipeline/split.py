"""Splits a causal language model into pipeline stages, once its class is verified to allow that.

Hidden states alone go from one stage to the next. What else a layer uses of earlier ones, such as indices or a cache
that they fill, is not always a visible argument. Between stages it is lost, and then loss or gradients differ. So
scaled-down models of the class run first: in stages, and as a whole.

Legend: B samples, T positions, t positions of the hidden states between stages (T, or with sequence parallelism those
of this tensor-parallel rank), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.models.loss_kind import is_causal_lm
from ds_trainer.parallel.patching import original_class
from ds_trainer.parallel.pipeline.stages import StagedModel, build_stages
from ds_trainer.parallel.pipeline.trace_model import (
    MISFITS,
    ModelTrace,
    not_splittable,
    run_small_model,
    small_models,
    trace_class,
)
from ds_trainer.planning.pp_costs import StageRanges

_TOLERANCE = 1e-4
"""Of the largest gradient; fp32, the same operations on the same numbers."""


def split_into_stages(
    model: nn.Module, ranges: StageRanges, own_stages: Sequence[int], owner_of: Callable[[int], int]
) -> StagedModel:
    """Splits a model in place into this rank's stages, whatever its architecture; needs no process group.

    The model keeps its class, its code and its config, and its parameters their names. Afterwards
    `model(pipeline_stage=s, hidden_states=x, **inputs)` runs one stage, and returns hidden states, or of the last stage
    what the class returns. Every stage is given all inputs, `input_ids` among them: the class's own code makes masks
    and position ids of them. Without `pipeline_stage`, modules that this rank does not hold raise an error.

    Args:
        model: A causal language model, on meta or not; sharded over the tensor-parallel group already.
        ranges: First layer of every stage, and the one behind its last.
        own_stages: This rank's stages, in order.
        owner_of: Stage -> the pipeline rank that has it.

    Shapes: hidden states (B, t, H) between stages.

    Raises:
        ModelError: The model's class cannot be split between its layers, or the layers are not as many.
    """
    if not isinstance(model, PreTrainedModel) or not is_causal_lm(model):
        raise not_splittable(
            f"the model is a {type(model).__name__}", "a pipeline runs causal language models of transformers"
        )
    if dropped := [module for module in model.modules() if getattr(module, "layerdrop", 0.0)]:
        raise ModelError(
            f"{type(dropped[0]).__name__} has a layerdrop of {dropped[0].layerdrop}, which skips layers at random",
            "hidden states enter a stage at its first layer and leave it behind its last one",
            "set layerdrop to 0 in the checkpoint's config.json, or parallel.pp to 1",
        )
    config_class: Any = type(model.config)
    trace = verified_trace(original_class(model), config_class)
    depth = len(model.get_submodule(trace.plan.layers))  # type: ignore[arg-type]
    if ranges[-1][1] != depth:
        raise ModelError(
            f"{type(model).__name__} has {depth} layers, and the stages have {ranges[-1][1]}",
            "each layer is in one stage",
            f"set parallel.pp_split to numbers of layers that add up to {depth}",
        )
    return build_stages(model, trace, ranges, own_stages, owner_of)


@cache
def verified_trace(cls: Any, config_class: Any) -> ModelTrace:
    """How a class runs its layers, after scaled-down models gave the same gradients split between any two of them.

    Args:
        cls: The class for causal language models.
        config_class: That of its config.

    Raises:
        ModelError: The class cannot be split, or not be scaled down; or a split model fails, or computes something
            else.
    """
    trace = trace_class(cls, config_class)
    rule = "all that a layer uses of the layers before it are the hidden states that it is given"
    for full, split in zip(small_models(cls, config_class), small_models(cls, config_class), strict=True):
        _loss(run_small_model(full)).backward()
        depth = len(split.get_submodule(trace.plan.layers))  # type: ignore[arg-type]
        try:
            build_stages(split, trace, tuple((i, i + 1) for i in range(depth)), range(depth), lambda stage: 0)
            _staged_step(split, depth)
        except MISFITS as error:
            found = f"{cls.__name__} fails when it is cut between its layers: {type(error).__name__}: {error}"
            raise not_splittable(found, rule) from error
        if differing := _differing(full, split):
            raise not_splittable(
                f"{cls.__name__}, cut between its layers, has other gradients of {', '.join(differing[:3])}"
                + f" and {len(differing) - 3} more" * (len(differing) > 3),
                rule,
            )
    return trace


def _staged_step(model: Any, depth: int) -> None:
    """A forward and a backward pass, one stage after the other."""
    received, sent = [], []
    hidden = None
    for stage in range(depth):
        output = run_small_model(model, pipeline_stage=stage, hidden_states=hidden)
        sent.append(output if stage < depth - 1 else _loss(output))
        hidden = sent[-1].detach().requires_grad_()
        received.append(hidden)
    sent.pop().backward()
    for output, leaf in zip(sent[::-1], received[-2::-1], strict=True):
        output.backward(leaf.grad)


def _loss(outputs: Any) -> torch.Tensor:
    return outputs.logits.float().square().mean()


def _differing(full: PreTrainedModel, split: PreTrainedModel) -> list[str]:
    """Names of parameters whose gradients differ."""
    gradients = {name: parameter.grad for name, parameter in split.named_parameters()}
    largest = max(p.grad.abs().max().item() for p in full.parameters() if p.grad is not None)
    differing = []
    for name, parameter in full.named_parameters():
        ours, theirs = (torch.zeros(()) if x is None else x for x in (gradients[name], parameter.grad))
        if not (ours - theirs).abs().max() <= _TOLERANCE * largest:
            differing.append(name)
    return differing
