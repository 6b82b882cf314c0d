"""The interface through which engines read a model's values."""

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
        """The value of parameter or persistent buffer `name` in the source's dtype, to be copied at once.

        It may be memory of the source, such as a mapped file: copying directly from it saves a second copy.

        Args:
            name: Name in `model.state_dict()`.
            flat: Start and stop in the row-major flattened tensor; None: the full tensor.

        Returns:
            Tensor of the full shape, or one-dimensional with `stop - start` elements.
        """

    def read_slice(self, name: str, wanted: TensorSlice) -> torch.Tensor:
        """A slice of `view`, to be copied at once; sources override this where they can read that slice alone.

        Args:
            name: As in `view`.
            wanted: The slice, in the full tensor.
        """
        return self.view(name)[wanted.index]

    def read(self, name: str, dtype: torch.dtype, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """A copy of `view` on the host.

        Args:
            name: As in `view`.
            dtype: Dtype of the copy.
            flat: As in `view`.
        """
        return self.view(name, flat).to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)

    @abstractmethod
    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype of the value at its source."""


class ModuleWeights(WeightSource):
    """Reads the values of a model instance; made before an engine casts or shards the instance's tensors.

    Args:
        model: The instance; its tensors are referenced, not copied.
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
