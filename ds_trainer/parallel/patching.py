"""Changes the forward of a single module: its class becomes one derived from the class it has."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch import nn


def mix_in(module: nn.Module, behaviour: type) -> None:
    """Puts a mixin in front of a module's class; the module stays the same object, of its old class too.

    A class and not an instance's `forward`: transformers' blocks recompute what their class's `forward` does, and a
    deep copy of the module must run on itself. Of several mixins the last one is the outermost.

    Args:
        module: Changed in place.
        behaviour: The mixin; has a `forward`.
    """
    own: type = type(module)
    module.__class__ = _mixed_class(behaviour, own)


def original_class(module: nn.Module) -> type:
    """The class that a module had before any mixin."""
    return getattr(type(module), "original_class", type(module))


@cache
def _mixed_class(behaviour: Any, base: Any) -> type:
    # transformers finds classes by their name, and `generate` looks at the signature to see what to pass.
    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return behaviour.forward(self, *args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": forward}
    names["original_class"] = getattr(base, "original_class", base)
    return type(base.__name__, (behaviour, base), names)
