"""Puts values into a model, and lists the buffers that belong to its state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ds_trainer.models.torch_wrappers import unwrapped_name
from ds_trainer.models.weight_source import WeightSource


def load_full(model: nn.Module, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
    """Loads all parameters and buffers in full, one at a time; tied parameters stay tied.

    Args:
        model: Skeleton with parameters on meta, or an instance.
        weights: Source of the values.
        device: Device to load to.
        dtype: Dtype of the floating-point parameters.
    """
    for name, parameter in model.named_parameters():
        value = weights.read(name, dtype if parameter.is_floating_point() else parameter.dtype)
        set_value(parameter, value.to(device))
    fill_buffers(model, weights, device)


def set_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the value of a parameter, on meta or not, in place: modules and optimizers that share it see the value."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    else:
        parameter.data = value


def fill_buffers(model: nn.Module, weights: WeightSource, device: torch.device) -> None:
    """Loads the persistent buffers; moves the others, which the skeleton has computed, to the device."""
    persistent = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        value = weights.read(name, buffer.dtype) if name in persistent else buffer
        setattr(model.get_submodule(parent), leaf, value.to(device))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every buffer in the model's state dict, such as running statistics."""
    persistent = model.state_dict().keys()
    named = model.named_buffers()
    # Some wrappers of torch leave their part of a name out of the state dict.
    return ((name, buffer) for name, buffer in named if {name, unwrapped_name(name, persistent)} & persistent)
