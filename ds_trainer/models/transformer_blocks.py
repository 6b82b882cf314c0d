"""Transformer blocks of a model, and the hidden states among their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of the classes in `_no_split_modules`; none without such a list, or for other libraries' models."""
    names = set(getattr(model, "_no_split_modules", None) or ()) if isinstance(model, PreTrainedModel) else set()
    return [module for module in model.modules() if type(module).__name__ in names]


def block_lists(model: nn.Module) -> Iterator[tuple[nn.Module, nn.ModuleList]]:
    """Every `nn.ModuleList` of blocks in the language model, with its owner; no lists of a vision encoder."""
    found = set(transformer_blocks(model))
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    for owner in decoder.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and any(
                block in found or isinstance(block, GradientCheckpointingLayer) for block in child
            ):
                yield owner, child


def has_parameters(module: nn.Module) -> bool:
    """Whether a module itself has parameters, its submodules aside."""
    return any(parameter is not None for parameter in module._parameters.values())


def get_hidden_states(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a block's arguments: the first tensor."""
    found: list[torch.Tensor] = []
    map_hidden_states(args, kwargs, found.append)
    return found[0]


def map_hidden_states(
    args: tuple, kwargs: dict[str, Any], function: Callable[[torch.Tensor], Any]
) -> tuple[tuple, dict[str, Any]]:
    """A block's arguments with the hidden states replaced by the function's result."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, kwargs | {name: function(kwargs[name])}


def other_differentiable_args(args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Positions and names of a block's arguments that require a gradient, the hidden states left out."""
    args, kwargs = map_hidden_states(args, kwargs, lambda hidden: None)
    arguments = (*enumerate(args), *kwargs.items())
    return [str(name) for name, value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
