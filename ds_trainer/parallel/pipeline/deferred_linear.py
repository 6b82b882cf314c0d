"""Linear layers that can defer the gradients of their weights, see `ds_trainer.parallel.deferred_weight_grads`.

Legend: I inputs, D outputs, N all dimensions before them in one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ds_trainer.parallel.deferred_weight_grads import gradient_or_defer
from ds_trainer.parallel.patching import mix_in
from ds_trainer.parallel.tensor.linear import RowParallelLinear


def enable_deferred_weight_gradients(model: nn.Module) -> None:
    """Lets a model's linear layers defer their weights' gradients within `defer_weight_gradients`.

    A layer whose class overrides `forward` is left as it is. Column layers, of which several are one node of the graph,
    can defer without it.
    """
    for module in model.modules():
        behaviour = _DEFERRING.get(type(module).forward)
        if behaviour is not None:
            mix_in(module, behaviour)


class _Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class _Conv1D(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, transposed=True)


class _RowParallelLinear(RowParallelLinear):
    def partial(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, None, self.transposed)


_DEFERRING: dict[Any, type[nn.Module]] = {
    nn.Linear.forward: _Linear,
    Conv1D.forward: _Conv1D,
    RowParallelLinear.forward: _RowParallelLinear,
}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False) -> torch.Tensor:
    """As `F.linear`, but gradients of weight and bias can be deferred.

    Shapes: (..., I) -> (..., D).

    Args:
        x: Input.
        weight: (D, I).
        bias: (D,); None: there is none.
        transposed: The weight is (I, D), as in GPT-2's `Conv1D`.
    """
    leaves = weight, bias
    if torch.is_autocast_enabled(x.device.type):  # It does not reach into a function.
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _LinearFunction.apply(leaves, transposed, x, weight, bias)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves, transposed, x, weight, bias):
        ctx.leaves, ctx.transposed = leaves, transposed
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        _, _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        grad_ND = grad.reshape(-1, grad.shape[-1])
        if needs_x:
            of_x = grad @ (weight.t() if ctx.transposed else weight)
        if needs_weight:
            x_NI = x.reshape(-1, x.shape[-1])
            factors = (x_NI, grad_ND) if ctx.transposed else (grad_ND, x_NI)
            of_weight = gradient_or_defer(ctx.leaves[0], partial(_product, *factors))
        if needs_bias:
            of_bias = gradient_or_defer(ctx.leaves[1], partial(torch.sum, grad_ND, 0))
        return None, None, of_x, of_weight, of_bias


def _product(a_NX: torch.Tensor, b_NY: torch.Tensor) -> torch.Tensor:
    return a_NX.t() @ b_NY
