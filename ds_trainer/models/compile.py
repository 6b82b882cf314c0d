"""Compiles a model block by block: one compilation serves all blocks of a class, and engines wrap them as they are."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from ds_trainer.errors import ModelError
from ds_trainer.log import get_logger
from ds_trainer.models.blocks import transformer_blocks


def compile_blocks(model: nn.Module) -> None:
    """Has `torch.compile` run the forward of each block in training; modules, names and state dicts stay.

    A second length of sequences is compiled for once more, then for every length. Evaluation and generation, whose
    cache grows with each token, run as ever.

    Raises:
        ModelError: The model names no blocks.
    """
    found = transformer_blocks(model)
    if not found:
        raise ModelError(
            f"model.compile is true and {type(model).__name__} names no blocks",
            "the blocks of a model are compiled, the modules that transformers says are not to be split",
            "set model.compile to false",
        )
    for block in found:
        block.forward = MethodType(_forward, block)  # Bound, so that a deep copy of the model runs its own.
    names = ", ".join(f"{count} {name}" for name, count in Counter(type(block).__name__ for block in found).items())
    get_logger().info("torch.compile runs the blocks (%s): the first steps take longer", names)


def _forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
    """Compiles what is below a block's hooks, which are the engine's. FSDP2 changes the class, so this looks late."""
    own: Any = type(self).forward
    return (_compiled(own) if self.training else own)(self, *args, **inputs)


_compiled = cache(torch.compile)
