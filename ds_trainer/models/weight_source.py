"""Where a model's values come from, as engines see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain

import torch
from torch import nn

from ds_trainer.layout import TensorSlice


class WeightSource(ABC):
    """Reads values under the model's own parameter names."""

    @abstractmethod
    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """The value of parameter or persistent buffer `name`, in the source's own format, to be copied from at once.

        It may be the source's own memory, such as a mapped file: copying straight from it spares a second copy.

        Args:
            name: Name in `model.state_dict()`.
            flat: Start and stop in the row-major flattened tensor; None: the whole tensor.

        Returns:
            Tensor of the full shape, or one-dimensional with `stop - start` elements.
        """

    def read_slice(self, name: str, wanted: TensorSlice) -> torch.Tensor:
        """A rectangular part of `view`, to be copied from at once; a source that can reads nothing else for it.

        Args:
            name: As in `view`.
            wanted: Which part of the full tensor.
        """
        return self.view(name)[wanted.index]

    def read(self, name: str, dtype: torch.dtype, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """A copy of `view` on the host.

        Args:
            name: As in `view`.
            dtype: Format wanted.
            flat: As in `view`.
        """
        return self.view(name, flat).to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)

    @abstractmethod
    def stored_dtype(self, name: str) -> torch.dtype:
        """Format in which the value is kept at its source."""


class ModuleWeights(WeightSource):
    """A source over a model instance, taken before an engine casts or cuts the instance's own tensors.

    Args:
        model: The instance; its tensors are referred to, not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        named = chain(model.named_parameters(), model.named_buffers())
        self.values = {name: tensor.data for name, tensor in named}

    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """As in `WeightSource`."""
        return self.values[name] if flat is None else self.values[name].flatten()[flat[0] : flat[1]]

    def stored_dtype(self, name: str) -> torch.dtype:
        """As in `WeightSource`."""
        return self.values[name].dtype
