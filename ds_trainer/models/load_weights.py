"""Puts values into a model, and lists the buffers that belong to its state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ds_trainer.models.weight_source import WeightSource


def load_full(model: nn.Module, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
    """Fills a model with whole tensors, one at a time; ties stay ties.

    Args:
        model: Skeleton with parameters on meta, or an instance.
        weights: Where the values are read from.
        device: Where they go.
        dtype: Format of the floating-point parameters.
    """
    for name, parameter in model.named_parameters():
        value = weights.read(name, dtype if parameter.is_floating_point() else parameter.dtype)
        set_value(parameter, value.to(device))
    fill_buffers(model, weights, device)


def set_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter, on meta or not, a value; the object stays, so modules and optimizers that share it keep it."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    else:
        parameter.data = value


def fill_buffers(model: nn.Module, weights: WeightSource, device: torch.device) -> None:
    """Reads the persistent buffers and moves the others, which the skeleton has computed, to the device."""
    persistent = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        value = weights.read(name, buffer.dtype) if name in persistent else buffer
        setattr(model.get_submodule(parent), leaf, value.to(device))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and live tensor of every buffer that a checkpoint of the model holds."""
    persistent = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
