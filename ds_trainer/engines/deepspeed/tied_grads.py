"""Gradients of copies of tied parameters, which no optimizer of their rank knows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn


class CopiedGradients:
    """Sums each copy's gradients over the micro-batches, in the format in which the optimizer of its owner sums.

    Args:
        copies: Parameters by name.
        dtype: Format of the sums.
    """

    def __init__(self, copies: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: dict[str, torch.Tensor] = {}
        for name, parameter in copies.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # Of a pass that puts weights' gradients off.
            return
        gradient, parameter.grad = parameter.grad.to(self._dtype), None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient

    def take(self) -> dict[str, torch.Tensor]:
        """The sums since the last call."""
        sums, self._sums = self._sums, {}
        return sums
