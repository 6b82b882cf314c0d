"""Values of this tensor rank's part of a model, read from a source of whole ones."""

from __future__ import annotations

from math import prod

import torch

from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit


class LocalWeights(WeightSource):
    """A `WeightSource` of local tensors: of a parameter that is cut, this rank's ranges; padding is 0.

    Args:
        whole: Source of full tensors.
        split: Which ranges this rank holds.
    """

    def __init__(self, whole: WeightSource, split: ModelSplit) -> None:
        self._whole, self._split = whole, split

    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """As in `WeightSource`, of the local tensor."""
        sharding = self._split.shardings.get(name)
        if sharding is None:
            return self._whole.view(name, flat)
        piece = self._split.slice(name, sharding.local_shape, flat or (0, prod(sharding.local_shape)))
        shape = sharding.local_shape if flat is None else (piece.numel,)
        parts = list(piece.parts())
        if [part.slice.numel for part in parts] == [piece.numel]:  # The source's own memory will do.
            return self._whole.read_slice(name, parts[0].slice).reshape(shape)
        local = torch.zeros(piece.numel, dtype=self.stored_dtype(name))
        for part in parts:
            part.of(local).copy_(self._whole.read_slice(name, part.slice))
        return local.view(shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        """As in `WeightSource`."""
        return self._whole.stored_dtype(name)
