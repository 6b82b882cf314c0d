"""Models without values: parameters on meta take neither memory nor time, whatever their size."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from accelerate import init_empty_weights
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

Build = Callable[[], PreTrainedModel]


def skeleton(build: Build, dtype: torch.dtype) -> PreTrainedModel:
    """The model that `build` constructs, with parameters on meta, tied ones tied, and buffers on the host.

    No checkpoint holds buffers such as rotary frequencies, so every rank computes them: by the class's initialisation,
    as `from_pretrained` does, or by its constructor where the initialisation leaves a buffer out.

    Args:
        build: Constructs the model in `dtype`.
        dtype: Dtype of the parameters, except those that the class always keeps in fp32.
    """
    model = _on_meta(build)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
    model.initialize_weights()
    filled = all(bool((buffer == buffer).all() & (buffer != _unset(buffer.dtype)).all()) for buffer in model.buffers())
    return _keep_in_fp32(model if filled else _parameters_on_meta(build), dtype)


def meta_copy(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the same class and config with all parameters on meta; the values of its buffers are undefined.

    It gives the full shapes, dtypes and ties, where an engine has replaced the parameters of `model` by shards.
    """
    return _keep_in_fp32(_on_meta(lambda: type(model)._from_config(deepcopy(model.config), dtype=dtype)), dtype)


def written_class(model: PreTrainedModel) -> type:
    """The model's class as its author wrote it, from which FSDP2 derives another one."""
    return next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, _, _ = build_glob_alternation(list(plan))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if pattern.search(name):
                tensor.data = tensor.data.float()
    return model


def _on_meta(build: Build) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):  # Some constructors read values, which tensors on meta lack.
        return _parameters_on_meta(build)


def _parameters_on_meta(build: Build) -> PreTrainedModel:
    """Constructs on the host and moves each parameter to meta at once."""
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()  # Moving parameters one by one separates tied ones.
    return model


def _unset(dtype: torch.dtype) -> float | int:
    """A value that no initialised buffer holds; bool has none, so a bool buffer counts as not initialised."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
