"""How a class's own forward runs on the layers of one pipeline stage.

The model's own code runs its list of layers from the first to the last. While a stage runs, the list gives out proxies
around that stage's layers. Layers before it return what they are given. The stage's first layer is given the hidden
states that came from the stage before. The layer behind its last one never runs: what the model's code would give it is
what the stage returns. In the place of modules before the layers, such as the embedding, later stages have a
`Placeholder`.

Legend: B samples, T positions, t positions of the hidden states between stages (T, or with sequence parallelism those
of this tensor-parallel rank), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn

from ds_trainer.errors import ModelError
from ds_trainer.models.transformer_blocks import get_hidden_states, map_hidden_states, other_differentiable_args
from ds_trainer.parallel.patching import mix_in, original_class
from ds_trainer.parallel.pipeline.trace_model import carries_more
from ds_trainer.parallel.tensor.sequence_parallel import stack_of
from ds_trainer.parallel.tensor.sequence_positions import mapped
from ds_trainer.planning.pp_costs import StageRanges


@dataclass(frozen=True)
class RunningStage:
    """The stage that runs.

    Args:
        start: Its first layer.
        stop: The layer behind its last one.
        hidden_BtH: What came from the stage before; None: it is the first one.
    """

    start: int
    stop: int
    hidden_BtH: torch.Tensor | None


class StageContext:
    """Which stage of one model runs: shared by the model's placeholders and its list of layers.

    Attributes:
        running: The stage; None: none.
    """

    def __init__(self) -> None:
        self.running: RunningStage | None = None

    @contextmanager
    def run(self, stage: RunningStage) -> Iterator[None]:
        """Within the block, `stage` runs."""
        self.running = stage
        try:
            yield
        finally:
            self.running = None

    def require(self, module: object) -> RunningStage:
        """The stage that runs, for a call of a module that this rank does not hold.

        Raises:
            ModelError: None runs.
        """
        if self.running is None:
            raise ModelError(
                f"a {type(module).__name__} is called that this rank does not hold: another pipeline stage has it",
                "the part of a model that a pipeline's rank holds does not run alone",
                "leave the model to the trainer, or set parallel.pp to 1",
            )
        return self.running


class Placeholder(nn.Module):
    """Takes the place of a module before the layers, and returns zeros of the shapes that the module would return.

    The values do not matter: the stage's first layer is given the hidden states that came from the stage before.

    Args:
        module: The module, which stays as it is.
        context: Knows which stage runs.
        replicas: Parameters of the module that this rank has a replica of, by their names in it.
    """

    def __init__(self, module: nn.Module, context: StageContext, replicas: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._context = context
        self.__dict__["_absent"] = _without_values(module)  # No child, whose parameters would be the model's.
        for name, parameter in replicas.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for part in path:
                holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            holder._parameters[last] = parameter
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros, in the dtype of the hidden states that the stage is given."""
        hidden_BtH = self._context.require(self._absent).hidden_BtH
        assert hidden_BtH is not None, "the first stage has what comes before the layers"
        args, kwargs = mapped((args, kwargs), lambda x: x.to("meta"))
        # Not what tensor parallelism has put before its class: that communicates.
        outputs = original_class(self._absent).forward(self._absent, *args, **kwargs)  # type: ignore[attr-defined]
        return mapped(outputs, lambda x: _zeros_like(x, hidden_BtH))

    def __getattr__(self, name: str) -> Any:
        """The absent module's attributes too, which the model's own code may read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_absent"], name)


def _zeros_like(x: torch.Tensor, hidden_BtH: torch.Tensor) -> torch.Tensor:
    """With memory of their own: the model's code may change them in place."""
    dtype = hidden_BtH.dtype if x.is_floating_point() else x.dtype
    return torch.zeros(x.shape, dtype=dtype, device=hidden_BtH.device)


def _without_values(module: nn.Module) -> Any:
    """A module of the same class and attributes, without hooks, its parameters and buffers on meta."""
    empty = copy(module)
    empty._parameters = {name: _on_meta(value) for name, value in module._parameters.items()}
    empty._buffers = {name: _on_meta(value) for name, value in module._buffers.items()}
    empty._modules = {name: child and _without_values(child) for name, child in module._modules.items()}
    for hooks in (name for name in vars(empty) if name.endswith("_hooks")):
        setattr(empty, hooks, {})
    return empty


def _on_meta(value: Any) -> Any:
    if value is None:
        return None
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


class StageDone(BaseException):
    """Ends the model's own forward where the stage that runs ends.

    Not an `Exception`: no code between the layers and the caller is to take it for a fault.

    Args:
        hidden_BtH: What the next stage's first layer would have been given.
    """

    def __init__(self, hidden_BtH: torch.Tensor) -> None:
        self.hidden_BtH = hidden_BtH
        super().__init__()


class StageLayers(nn.ModuleList):
    """A model's list of layers: as long as the full one, but with modules for this rank's layers only.

    Its children keep their numbers as names, so parameters keep the names that they have in the full model.
    """

    context: StageContext
    absent: dict[int, nn.Module]
    outputs: int | None

    @staticmethod
    def restrict(layers: nn.ModuleList, own: set[int], context: StageContext, outputs: int | None) -> None:
        """Reduces a list of layers to this rank's, in place.

        Args:
            layers: All layers.
            own: Numbers of this rank's; the others lose their values.
            context: Knows which stage runs.
            outputs: Length of the tuple that a layer returns, hidden states first; None: it returns them alone.
        """
        # The model's own code may ask them what kind of layer they are.
        absent = {i: _without_values(layer) for i, layer in enumerate(layers) if i not in own}
        for i in absent:
            del layers._modules[str(i)]
        layers.__class__ = StageLayers
        layers.context, layers.absent, layers.outputs = context, absent, outputs  # type: ignore[assignment]

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
        """The layer, or a proxy of it."""
        own = self._modules.get(str(index))
        layer: Any = self.absent[index] if own is None else own
        running = self.context.running
        if running is None:
            return _LayerProxy(layer, self._skip) if own is None else own
        if index == running.stop:
            return _LayerProxy(layer, self._leave)
        if not running.start <= index < running.stop:
            return _LayerProxy(layer, self._skip)
        if index == running.start and running.hidden_BtH is not None:
            return _LayerProxy(layer, self._enter)
        return own

    def _skip(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the hidden states unchanged, in the form in which the layer returns them."""
        self.context.require(layer)
        hidden = get_hidden_states(args, kwargs)
        return hidden if self.outputs is None else (hidden, *[None] * (self.outputs - 1))

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the stage's first layer on the hidden states from the stage before."""
        # Here and not in a hook of the layer: an engine's hooks must see what the layer really is given.
        hidden_BtH = self.context.require(layer).hidden_BtH
        if (stack := stack_of(layer)) is not None:
            stack.enter()
        args, kwargs = map_hidden_states(args, kwargs, lambda _: hidden_BtH)
        return layer(*args, **kwargs)

    def _leave(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Ends the stage with what the next stage's first layer is given."""
        if (stack := stack_of(layer)) is not None:
            stack.leave()
        if lost := other_differentiable_args(args, kwargs):
            raise carries_more(type(layer).__name__, lost)
        raise StageDone(get_hidden_states(args, kwargs))


class _LayerProxy:
    """Has a layer's attributes and counts as one of its class, but a call runs `function`."""

    def __init__(self, layer: nn.Module, function: Callable[[nn.Module, tuple, dict[str, Any]], Any]) -> None:
        self._layer, self._function = layer, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._layer)


@dataclass(frozen=True)
class SpareSlot:
    """Where this rank has a module before the layers, and the placeholder for it while a later stage runs.

    Args:
        parent: Holds the module.
        name: The module's name in it.
        placeholder: Takes its place.
    """

    parent: nn.Module
    name: str
    placeholder: Placeholder


def run_by_stages(model: nn.Module, context: StageContext, ranges: StageRanges, spare: list[SpareSlot]) -> None:
    """Lets a model take `pipeline_stage` and `hidden_states` in its forward: it then runs that stage alone.

    Args:
        model: Changed in place; its layers are `StageLayers` of the same context.
        context: Set while a stage runs.
        ranges: First layer of every stage, and the one behind its last.
        spare: Modules to exchange while a later stage than the first runs.
    """
    mix_in(model, _Staged)
    model.pipeline_stages = _Stages(context, ranges, spare)  # type: ignore[assignment]


class _Stages:
    """Runs one stage of a model at a time; the arguments are those of `run_by_stages`."""

    def __init__(self, context: StageContext, ranges: StageRanges, spare: list[SpareSlot]) -> None:
        self._context, self._ranges, self._spare = context, ranges, spare

    @contextmanager
    def running(self, stage: int, hidden_BtH: torch.Tensor | None) -> Iterator[None]:
        """Within the block a stage runs."""
        replaced = []
        for slot in self._spare if stage > 0 else ():
            replaced.append((slot, slot.parent._modules[slot.name]))
            slot.parent._modules[slot.name] = slot.placeholder
        try:
            with self._context.run(RunningStage(*self._ranges[stage], hidden_BtH)):
                yield
        finally:
            for slot, module in replaced:
                slot.parent._modules[slot.name] = module


class _Staged:
    """A model that runs stage by stage."""

    pipeline_stages: _Stages

    def forward(
        self: Any,
        *args: Any,
        pipeline_stage: int | None = None,
        hidden_states: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if pipeline_stage is None:
            return super().forward(*args, **inputs)  # type: ignore[misc]
        try:
            with self.pipeline_stages.running(pipeline_stage, hidden_states):
                return super().forward(*args, **inputs)  # type: ignore[misc]
        except StageDone as done:
            return done.hidden_BtH
