"""The layers of a model of which this rank holds some, and what stands in for the others while one stage runs.

The model's own code runs its list of layers from the first to the last. The list hands out stand-ins around the layers
of the stage that runs: those before it pass on what they are given, the first one of the stage is given the hidden
states that came from the stage before, and the layer behind its last one is never run: what the model's code would
give it is what the stage returns.

Legend: B samples, T positions, t positions of the hidden states between stages (T, or with sequence parallelism those
of this tensor rank), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

from torch import nn

from ds_trainer.models.blocks import get_hidden_states, map_hidden_states, other_differentiable_args
from ds_trainer.parallel.pipeline.placeholder import without_values
from ds_trainer.parallel.pipeline.stage_context import Passage, StageDone
from ds_trainer.parallel.pipeline.trace_model import carries_more
from ds_trainer.parallel.tensor.sequence import stack_of


class StageLayers(nn.ModuleList):
    """A model's list of layers: as long as the whole one, but with modules for this rank's layers only.

    Its children keep their numbers as names, so parameters have the names that they have in the whole model.
    """

    passage: Passage
    absent: dict[int, nn.Module]
    outputs: int | None

    @staticmethod
    def cut(layers: nn.ModuleList, own: set[int], passage: Passage, outputs: int | None) -> None:
        """Makes a list of layers this rank's, in place.

        Args:
            layers: All layers.
            own: Numbers of this rank's; the others lose their values.
            passage: Knows which stage runs.
            outputs: Length of the tuple that a layer returns, hidden states first; None: it returns them alone.
        """
        # The model's own code may ask them what kind of layer they are.
        absent = {i: without_values(layer) for i, layer in enumerate(layers) if i not in own}
        for i in absent:
            del layers._modules[str(i)]
        layers.__class__ = StageLayers
        layers.passage, layers.absent, layers.outputs = passage, absent, outputs  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._modules) + len(self.absent)

    def __iter__(self) -> Iterator[Any]:
        return (self._at(i) for i in range(len(self)))

    @overload
    def __getitem__(self, index: slice) -> Any: ...
    @overload
    def __getitem__(self, index: int) -> Any: ...
    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        return self._at(numbers) if isinstance(numbers, int) else [self._at(i) for i in numbers]

    def _at(self, index: int) -> Any:
        """The layer, or what stands in for it."""
        own = self._modules.get(str(index))
        layer: Any = self.absent[index] if own is None else own
        running = self.passage.running
        if running is None:
            return _StandIn(layer, self._pass_on) if own is None else own
        if index == running.stop:
            return _StandIn(layer, self._leave)
        if not running.start <= index < running.stop:
            return _StandIn(layer, self._pass_on)
        if index == running.start and running.hidden_BtH is not None:
            return _StandIn(layer, self._enter)
        return own

    def _pass_on(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.passage.require(layer)
        hidden = get_hidden_states(args, kwargs)
        return hidden if self.outputs is None else (hidden, *[None] * (self.outputs - 1))

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Here and not in a hook of the layer: an engine's hooks must see what the layer really is given.
        hidden_BtH = self.passage.require(layer).hidden_BtH
        if (stack := stack_of(layer)) is not None:
            stack.enter()
        args, kwargs = map_hidden_states(args, kwargs, lambda _: hidden_BtH)
        return layer(*args, **kwargs)

    def _leave(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if (stack := stack_of(layer)) is not None:
            stack.leave()
        if lost := other_differentiable_args(args, kwargs):
            raise carries_more(type(layer).__name__, lost)
        raise StageDone(get_hidden_states(args, kwargs))


class _StandIn:
    """Has a layer's attributes and counts as one of its class, but what a call does is up to `function`."""

    def __init__(self, layer: nn.Module, function: Callable[[nn.Module, tuple, dict[str, Any]], Any]) -> None:
        self._layer, self._function = layer, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._layer)
