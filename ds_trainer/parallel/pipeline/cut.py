"""Cuts a causal language model into pipeline stages, whatever its architecture.

Legend: B samples, T positions, t positions of the hidden states between stages (T, or with sequence parallelism those
of this tensor rank), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.models.pretrained import is_causal_lm
from ds_trainer.parallel.patching import original_class
from ds_trainer.parallel.pipeline.stages import StagedModel, StageRanges, cut_stages
from ds_trainer.parallel.pipeline.trace_model import refusal
from ds_trainer.parallel.pipeline.verify_cut import proven


def cut_model(
    model: nn.Module, ranges: StageRanges, own_stages: Sequence[int], owner_of: Callable[[int], int]
) -> StagedModel:
    """Cuts a model in place into this rank's stages; needs no process group.

    The model keeps its class, its code and its config, and its parameters their names. Afterwards
    `model(pipeline_stage=s, hidden_states=x, **inputs)` runs one stage, and returns hidden states, or of the last stage
    what the class returns. Every stage is given the whole inputs, `input_ids` among them: masks and position ids are
    made of them by the class's own code. What another stage has cannot run: without `pipeline_stage` it is refused.

    Args:
        model: A causal language model, on meta or not; split over the tensor group already.
        ranges: First layer of every stage, and the one behind its last.
        own_stages: This rank's stages, in order.
        owner_of: Stage -> the pipeline rank that has it.

    Shapes: hidden states (B, t, H) between stages.

    Raises:
        ModelError: The model's class cannot be cut between its layers, or the layers are not as many.
    """
    if not isinstance(model, PreTrainedModel) or not is_causal_lm(model):
        raise refusal(
            f"the model is a {type(model).__name__}", "a pipeline runs causal language models of transformers"
        )
    if dropped := [module for module in model.modules() if getattr(module, "layerdrop", 0.0)]:
        raise ModelError(
            f"{type(dropped[0]).__name__} has a layerdrop of {dropped[0].layerdrop}, which skips layers at random",
            "hidden states enter a stage at its first layer and leave it behind its last one",
            "set layerdrop to 0 in the checkpoint's config.json, or parallel.pp to 1",
        )
    config_class: Any = type(model.config)
    seen = proven(original_class(model), config_class)
    depth = len(model.get_submodule(seen.plan.layers))  # type: ignore[arg-type]
    if ranges[-1][1] != depth:
        raise ModelError(
            f"{type(model).__name__} has {depth} layers, and the stages have {ranges[-1][1]}",
            "each layer is in one stage",
            f"set parallel.pp_split to numbers of layers that add up to {depth}",
        )
    return cut_stages(model, seen, ranges, own_stages, owner_of)
