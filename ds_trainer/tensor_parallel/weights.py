"""Values of this tensor rank's part of a model, read from a source of whole ones."""

from __future__ import annotations

import torch

from ds_trainer.models.source import WeightSource
from ds_trainer.tensor_parallel.split import ModelSplit


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
        cut = self._split.cuts.get(name)
        if cut is None:
            return self._whole.view(name, flat)
        full = self._whole.view(name)
        local = full.new_zeros(cut.local_shape)
        at = 0
        for start, stop in cut.ranges[self._split.rank]:
            local.narrow(cut.dim, at, stop - start).copy_(full.narrow(cut.dim, start, stop - start))
            at += stop - start
        return local if flat is None else local.flatten()[flat[0] : flat[1]]

    def stored_dtype(self, name: str) -> torch.dtype:
        """As in `WeightSource`."""
        return self._whole.stored_dtype(name)
