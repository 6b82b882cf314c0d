"""The backward pass in two: gradients of a stage's input now, those of its weights later.

The first part is an ordinary backward pass in which linear layers defer their weights' gradients. These need the
layer's input and its output's gradient, which are kept, and nothing else of the graph. A gradient that cannot be
deferred, as a norm's, is computed at once. So gradients are right whatever a stage consists of, such as weights used
twice, recomputed activations or custom autograd functions; only the time at which they are computed differs.

Source: Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 2 (B and W).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Compute = Callable[[], torch.Tensor]


class DeferredGradients:
    """Gradients of weights that one backward pass has deferred."""

    def __init__(self) -> None:
        self._deferred: deque[tuple[torch.Tensor, Compute]] = deque()

    def defer(self, weight: torch.Tensor, compute: Compute) -> None:
        """Records how a leaf's gradient is computed."""
        self._deferred.append((weight, compute))

    def accumulate(self) -> None:
        """Computes them and adds them to `grad` as a backward pass does: hooks of the weights run."""
        while self._deferred:
            weight, compute = self._deferred.popleft()
            torch.autograd.backward(weight, compute().to(weight.dtype))


# Of the process and not of the thread: on a GPU backward passes run in threads of autograd's.
_current: DeferredGradients | None = None


@contextmanager
def defer_weight_gradients() -> Iterator[DeferredGradients]:
    """A backward pass in this block leaves the gradients of weights to the object that it yields."""
    global _current
    _current = DeferredGradients()
    try:
        yield _current
    finally:
        _current = None


def is_deferring() -> bool:
    """Whether the running backward pass is within `defer_weight_gradients`."""
    return _current is not None


def gradient_or_defer(weight: torch.Tensor, compute: Compute) -> torch.Tensor | None:
    """What a function's backward returns for a weight: its gradient, or None where that is deferred.

    Args:
        weight: The leaf, also where the function was given a copy of it in autocast's dtype.
        compute: Computes the gradient; holds what it needs for that.
    """
    if _current is None:
        return compute()
    _current.defer(weight, compute)
    return None
