"""The buffers that belong to a model's state, such as running statistics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and live tensor of every buffer that a checkpoint of the model holds."""
    persistent = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
