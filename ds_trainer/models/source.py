"""Where a model's values come from, as engines see it."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Reads a checkpoint's values under the model's own parameter names, through transformers' conversions."""

    def read(self, name: str, dtype: torch.dtype, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """The value of parameter or persistent buffer `name`.

        Args:
            name: Name in `model.state_dict()`.
            dtype: Format wanted.
            flat: Start and stop in the row-major flattened tensor; None: the whole tensor.

        Returns:
            Host tensor, of the full shape, or one-dimensional with `stop - start` elements.
        """
