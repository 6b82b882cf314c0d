"""Dropout masks under tensor parallelism: equal on all ranks for full tensors, different on each rank for its shard.

The default generator is the same on all tensor-parallel ranks of one data-parallel rank. A rank's own random numbers
come from a seed that is drawn from it, so that its state alone needs to be kept for a resume or for recomputed
activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.parallel.patching import mix_in
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


def has_dropout(model: nn.Module) -> bool:
    """Whether any module of a model, or its config, has a rate of dropout other than 0."""
    settings = [vars(module) for module in model.modules()]
    config = getattr(model, "config", None)
    if config is not None:
        settings.append(config.get_text_config().to_dict())
    return any(isinstance(module, nn.Dropout) and module.p for module in model.modules()) or any(
        "drop" in name and isinstance(value, float) and value for each in settings for name, value in each.items()
    )


def draw_seed() -> int:
    """A number from the host's default generator, so that no GPU is waited for."""
    return int(torch.randint(2**62, ()))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block a device's random numbers come from a seed; afterwards its old state is restored."""
    stream = Stream()
    stream.begin(seed, device)
    try:
        yield
    finally:
        stream.end()


class Stream:
    """Random numbers from a seed between `begin` and `end`; further calls of either change nothing."""

    def __init__(self) -> None:
        self._outside: tuple[torch.Generator, torch.Tensor] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._outside is not None

    def begin(self, seed: int, device: torch.device) -> None:
        """Seeds the device's default generator."""
        generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        self._outside = generator, generator.get_state()
        generator.manual_seed(seed)

    def end(self) -> None:
        """Gives the generator the state that it had at the beginning."""
        if self._outside is not None:
            generator, state = self._outside
            generator.set_state(state)
            self._outside = None


def draw_masks_per_rank(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets each tensor-parallel rank draw its own dropout masks between its column and row layers.

    Args:
        model: Changed in place: every module that holds column layers.
        group: The tensor-parallel group.
    """
    for module in list(model.modules()):
        if not any(isinstance(child, ColumnParallelLinear) for child in module.children()):
            continue
        masks = _Masks(group)
        mix_in(module, _OwnMasks)
        module.masks = masks  # type: ignore[assignment]
        for child in module.children():
            if isinstance(child, ColumnParallelLinear):
                child.register_forward_pre_hook(masks.enter)
            elif isinstance(child, RowParallelLinear):
                child.register_forward_pre_hook(masks.leave)


class _Masks:
    """The random numbers of one module's shard."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.stream = group, Stream()

    def enter(self, layer: ColumnParallelLinear, args: tuple[torch.Tensor, ...]) -> None:
        """From a column layer on, each rank has a shard."""
        if layer.training and not layer.gather_output and not self.stream.is_running:
            self.stream.begin(draw_seed() + self._group.rank(), args[0].device)

    def leave(self, layer: RowParallelLinear, args: tuple[torch.Tensor, ...]) -> None:
        """From a row layer on, all ranks have the full tensor, or a shard of the sequence."""
        if not layer.sequence_parallel:
            self.stream.end()


class _OwnMasks:
    """A module that holds column layers: its stream of random numbers ends with its forward."""

    masks: _Masks

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.masks.stream.end()
