"""Gives a single module a behaviour of its own: a class derived from the one it has."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch import nn


def mix_in(module: nn.Module, behaviour: type) -> None:
    """Puts a mixin in front of a module's class; the module stays the same object, of its old class too.

    A class and not an instance's `forward`: transformers' blocks recompute what their class's `forward` does, and a
    deep copy of the module runs its own. Where it is done twice, what came later is outside.

    Args:
        module: Changed in place.
        behaviour: The mixin; has a `forward`.
    """
    own: type = type(module)
    module.__class__ = _mixed_class(behaviour, own)


def original_class(module: nn.Module) -> type:
    """The class that a module had before any behaviour was put in front of it."""
    return getattr(type(module), "stock", type(module))


@cache
def _mixed_class(behaviour: Any, base: Any) -> type:
    # transformers finds classes by their name, and `generate` looks at the signature to see what to pass.
    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return behaviour.forward(self, *args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": forward}
    names["stock"] = getattr(base, "stock", base)
    return type(base.__name__, (behaviour, base), names)
