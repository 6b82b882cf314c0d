"""Compiles a model block by block: blocks of a class share one compilation, and engines wrap the modules as before."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from ds_trainer.errors import ModelError
from ds_trainer.log import get_logger
from ds_trainer.models.transformer_blocks import transformer_blocks


def compile_blocks(model: nn.Module) -> None:
    """Compiles the forward of each block for training; modules, names and state dicts do not change.

    A second sequence length compiles a block once more, for every length. Evaluation and generation, whose cache grows
    with each token, are not compiled.

    Raises:
        ModelError: The model lists no blocks.
    """
    found = transformer_blocks(model)
    if not found:
        raise ModelError(
            f"model.compile is true and {type(model).__name__} lists no blocks",
            "the blocks of a model are compiled, which models of transformers list in _no_split_modules",
            "set model.compile to false",
        )
    for block in found:
        block.forward = MethodType(_forward, block)  # Bound, so that a deep copy of the model runs its own.
    names = ", ".join(f"{count} {name}" for name, count in Counter(type(block).__name__ for block in found).items())
    get_logger().info("torch.compile runs the blocks (%s): the first steps take longer", names)


def _forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
    """Runs below a block's hooks, which are the engine's. Looks the class up at call time, since FSDP2 changes it."""
    forward: Any = type(self).forward
    return (_compiled(forward) if self.training else forward)(self, *args, **inputs)


_compiled = cache(torch.compile)
