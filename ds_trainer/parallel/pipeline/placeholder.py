"""What stands in for modules of other stages, outside of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.patching import original_class
from ds_trainer.parallel.pipeline.stage_context import Passage
from ds_trainer.parallel.tensor.sequence_shard import mapped


class Blank(nn.Module):
    """Stands in for a module before the layers: returns zeros of the shapes that it would return.

    The values do not matter: the stage's first layer is given the hidden states that came from the stage before.

    Args:
        module: The module, which stays as it is.
        passage: Knows which stage runs.
        copies: Parameters of the module that this rank has a copy of, by their names in it.
    """

    def __init__(self, module: nn.Module, passage: Passage, copies: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._passage = passage
        self.__dict__["_absent"] = without_values(module)  # No child, whose parameters would be the model's.
        for name, parameter in copies.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for part in path:
                holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            holder._parameters[last] = parameter
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros, in the format of the hidden states that the stage is given."""
        hidden_BtH = self._passage.require(self._absent).hidden_BtH
        assert hidden_BtH is not None, "the first stage has what comes before the layers"
        args, kwargs = mapped((args, kwargs), lambda x: x.to("meta"))
        # Not what tensor parallelism has put before its class: that communicates.
        outputs = original_class(self._absent).forward(self._absent, *args, **kwargs)  # type: ignore[attr-defined]
        return mapped(outputs, lambda x: _zeros_like(x, hidden_BtH))

    def __getattr__(self, name: str) -> Any:
        """The absent module's attributes too, which the model's own code may ask for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_absent"], name)


def _zeros_like(x: torch.Tensor, hidden_BtH: torch.Tensor) -> torch.Tensor:
    """Real ones: the model's own code may change them in place."""
    dtype = hidden_BtH.dtype if x.is_floating_point() else x.dtype
    return torch.zeros(x.shape, dtype=dtype, device=hidden_BtH.device)


def without_values(module: nn.Module) -> Any:
    """A module of the same class and attributes, without hooks, its parameters and buffers on meta."""
    twin = copy(module)
    twin._parameters = {name: _on_meta(value) for name, value in module._parameters.items()}
    twin._buffers = {name: _on_meta(value) for name, value in module._buffers.items()}
    twin._modules = {name: child and without_values(child) for name, child in module._modules.items()}
    for hooks in (name for name in vars(twin) if name.endswith("_hooks")):
        setattr(twin, hooks, {})
    return twin


def _on_meta(value: Any) -> Any:
    if value is None:
        return None
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
