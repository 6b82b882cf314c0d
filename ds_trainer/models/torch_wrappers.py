"""Wrappers of torch around modules, such as `torch.compile` and DDP: seen through to the model and its own names."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel

_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module", "module")
"""What the wrapped module is called in `torch.compile`'s wrapper, in `checkpoint_wrapper`'s, and in DDP's."""


def unwrapped_name(name: str, known: Collection[str]) -> str:
    """The name of a parameter or buffer as the model's class has it.

    Args:
        name: Its name in the model, whose layers may be wrapped.
        known: The names of the class; a name that is none of them with and without wrappers stays as it is.
    """
    if name in known:
        return name
    bare = ".".join(part for part in name.split(".") if part not in _CHILDREN)
    return bare if bare in known else name


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The model inside of wrappers around all of it."""
    while not isinstance(model, PreTrainedModel):
        children = list(model.named_children())
        if len(children) != 1 or children[0][0] not in _CHILDREN:
            break
        model = children[0][1]
    return model
