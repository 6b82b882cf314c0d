"""Unsharded parameters that every tensor-parallel rank uses on its own shard of the activations.

Each rank's gradient of such a parameter is then one term of a sum, as of a norm over this rank's heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_trainer.parallel.patching import mix_in
from ds_trainer.parallel.tensor.collectives import sum_gradient


@contextmanager
def summed_gradients(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Within the block the module's code finds, under its own parameters' names, tensors whose gradient is summed.

    The sum is part of the autograd graph, so that it takes place before whatever an engine does with `.grad`. Python
    looks into an instance's `__dict__` before it asks `nn.Module.__getattr__`, which finds the parameters.

    Args:
        module: Its parameters, not those of its children.
        group: The tensor-parallel group.

    Comm: in the backward pass one all-reduce over `group` per parameter, of its size.
    """
    shadows = {
        name: sum_gradient(parameter, group)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    }
    module.__dict__.update(shadows)
    try:
        yield
    finally:
        for name in shadows:
            del module.__dict__[name]


class PartialGradients:
    """A module each of whose calls computes one term of its parameters' gradients.

    Comm: as `summed_gradients`.
    """

    partial_gradient_group: dist.ProcessGroup

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What the module's own class computes."""
        with summed_gradients(self, self.partial_gradient_group):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def sum_partial_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets a module sum the gradients of its own parameters over the tensor-parallel group.

    Args:
        module: Changed in place, such as a norm over this rank's heads.
        group: The tensor-parallel group.
    """
    if not isinstance(module, PartialGradients):
        mix_in(module, PartialGradients)
    module.partial_gradient_group = group  # type: ignore[assignment]
