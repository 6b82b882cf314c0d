"""Reads the structure of a block, and of the module that runs the blocks, from their modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ds_trainer.parallel.tensor.linear import ParallelLinear, RowParallelLinear
from ds_trainer.parallel.tensor.splitter import Splitter

_POINTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations")


def final_norm(owner: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The norm behind an owner's blocks; None: there is none, or other modules may come before it."""
    children = list(owner.children())
    after = [child for child in children[children.index(layers) + 1 :] if list(child.parameters())]
    return after[0] if len(after) == 1 and _is_norm(after[0]) else None


def called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module calls: its children, and in the place of lists their members."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from called_modules(child)
        else:
            yield child


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module is known to treat positions one by one; otherwise it runs as a region, which is always right."""
    if isinstance(module, nn.Identity) or _is_norm(module):
        return True
    return type(module).__module__ in _POINTWISE and not list(module.parameters())


def closing_row_layer(region: nn.Module, splitter: Splitter) -> RowParallelLinear | None:
    """The row layer in which a region ends; None: the region is summed otherwise, or in several places.

    The layer is the region's own child, and nothing else in the region sums over the tensor-parallel group. A region
    with unsharded parameters of its own has none: it may use them behind the layer, on all positions or on some.
    """
    rows = [module for module in region.modules() if isinstance(module, RowParallelLinear)]
    if len(rows) != 1 or rows[0] not in set(region.children()):
        return None
    others = [p for m in region.modules() if not isinstance(m, ParallelLinear) for p in m.parameters(recurse=False)]
    if any(splitter.is_sharded(parameter) and parameter.dim() > 1 for parameter in others):
        return None
    return rows[0] if all(map(splitter.is_sharded, region.parameters(recurse=False))) else None


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and all(parameter.dim() < 2 for parameter in module.parameters())
