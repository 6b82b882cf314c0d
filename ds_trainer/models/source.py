"""Where a model's values come from, as engines see it."""

from __future__ import annotations

from itertools import chain
from typing import Protocol

import torch
from torch import nn


class WeightSource(Protocol):
    """Reads values under the model's own parameter names."""

    def read(self, name: str, dtype: torch.dtype, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """The value of parameter or persistent buffer `name`.

        Args:
            name: Name in `model.state_dict()`.
            dtype: Format wanted.
            flat: Start and stop in the row-major flattened tensor; None: the whole tensor.

        Returns:
            Host tensor, of the full shape, or one-dimensional with `stop - start` elements.
        """

    def stored_dtype(self, name: str) -> torch.dtype:
        """Format in which the value is kept at its source."""


class ModuleWeights:
    """A source over a model instance, taken before an engine casts or cuts the instance's own tensors.

    Args:
        model: The instance; its tensors are referred to, not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        named = chain(model.named_parameters(), model.named_buffers())
        self.values = {name: tensor.data for name, tensor in named}

    def read(self, name: str, dtype: torch.dtype, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """As in `WeightSource`."""
        value = self.values[name] if flat is None else self.values[name].flatten()[flat[0] : flat[1]]
        return value.to("cpu", dtype, copy=True)

    def stored_dtype(self, name: str) -> torch.dtype:
        """As in `WeightSource`."""
        return self.values[name].dtype
