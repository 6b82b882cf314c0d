"""Which modules ZeRO-3 gathers at once, before they run, instead of one linear layer after the other."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.models.transformer_blocks import transformer_blocks
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear


def gather_together(model: nn.Module, config: ModelConfig) -> None:
    """Marks modules whose parameters, those of all modules inside included, DeepSpeed gathers as they are entered.

    These are blocks, where their operators are compiled or run a second time: no collective of ZeRO then comes between
    them. Elsewhere they are modules with column layers that read one tensor: the first of these computes with the
    weights of all, and DeepSpeed's hooks on each would pass each a tensor of its own.

    Args:
        model: The model, before DeepSpeed shards it.
        config: The config's model section.
    """
    gathered = transformer_blocks(model) if config.compile or config.gradient_checkpointing == "selective" else []
    inside = {part for block in gathered for part in block.modules()}
    gathered += [module for module in model.modules() if module not in inside and _holds_column_group(module)]
    if not gathered:
        return
    deepspeed.utils.set_z3_leaf_modules(model, list({type(module) for module in gathered}))
    for module in gathered:
        if any(parameter.requires_grad for parameter in module.parameters()):
            module.register_forward_pre_hook(_show_input, with_kwargs=True)


def _holds_column_group(module: nn.Module) -> bool:
    columns = (child for child in module.children() if isinstance(child, ColumnParallelLinear))
    return any(len(column.column_group.members) > 1 for column in columns)


def _show_input(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Lets DeepSpeed find a positional input with a gradient.

    That gradient is its sign that the module's backward pass has ended. Where it finds none, it reduces the gradients
    of the module's parameters before they are computed.
    """
    if not args:
        kind: Any = type(module)  # To mypy the class of a module is not hashable.
        name = _first_argument(kind)
        args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
    if torch.is_grad_enabled() and not args[0].requires_grad:
        args = (args[0].detach().requires_grad_(), *args[1:])
    return args, kwargs


@cache
def _first_argument(kind: type) -> str:
    """Name of the first argument of a class's forward; a derived class that takes `*args` gets its base's."""
    forwards = (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    firsts = ([*inspect.signature(forward).parameters.values()][1] for forward in forwards)
    return next(first.name for first in firsts if first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
