"""Traces what a class of causal language models runs before, in and after its layers.

A list of modules does not say which of them run before the layers and which after, or what a layer returns. Both also
change between versions of transformers. So a model of the class with a few thousand parameters runs once, with hooks
that note its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.models.small_configs import VOCAB, small_configs
from ds_trainer.models.transformer_blocks import block_lists, has_parameters, other_differentiable_args
from ds_trainer.planning.pp_plan import StagePlan

MIN_LAYERS = 3  # A first one, a last one, and one that is neither.
_SHAPE = (2, 7)
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What a scaled-down model may raise where its sizes do not fit one another, or a library is missing."""


@dataclass(frozen=True)
class ModelTrace:
    """How a class runs its layers.

    Args:
        plan: The outermost modules that it uses before and after them. Those that text does not reach, such as a vision
            tower, count as before.
        outputs: Length of the tuple that a layer returns, hidden states first; None: it returns them alone.
    """

    plan: StagePlan
    outputs: int | None


def trace_class(cls: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> ModelTrace:
    """Runs scaled-down models of a class and notes in which order their modules are called.

    Args:
        cls: The class for causal language models.
        config_class: That of its config.

    Raises:
        ModelError: The class cannot be split between its layers, or not be scaled down.
    """
    try:
        traces = [_trace(model) for model in small_models(cls, config_class)]
    except MISFITS as error:
        raise not_splittable(
            f"{cls.__name__} does not run with a scaled-down config: {type(error).__name__}: {error}",
            "a small model of the class runs first, which shows what comes before and after its layers",
        ) from error
    (layers,) = {each.plan.layers for each in traces}
    (outputs,) = {each.outputs for each in traces}
    first = dict.fromkeys(name for each in traces for name in each.plan.first)
    last = dict.fromkeys(name for each in traces for name in each.plan.last)
    return ModelTrace(StagePlan(layers, tuple(first), tuple(last)), outputs)


def small_models(cls: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> Iterator[PreTrainedModel]:
    """Scaled-down models of a class with random values, the same each time, without dropout."""
    for config in small_configs(config_class, MIN_LAYERS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = cls(deepcopy(config))
        for number, module in enumerate(model.modules()):
            module.register_forward_pre_hook(partial(_seed, number))
        yield model


def run_small_model(model: Any, **inputs: Any) -> Any:
    """The outputs of a scaled-down model for some tokens, the same ones each time."""
    input_ids = torch.randint(3, VOCAB, _SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        return model(input_ids=input_ids, use_cache=False, **inputs)


def not_splittable(found: str, rule: str) -> ModelError:
    """The error about a model that cannot be split into stages."""
    return ModelError(found, rule, "set parallel.pp to 1; FSDP2, ZeRO and parallel.tp shard every layer instead")


def carries_more(class_name: str, arguments: list[str]) -> ModelError:
    """The error about layers that are given more than hidden states with a gradient."""
    names = ", ".join(arguments)
    return not_splittable(
        f"layers of {class_name} are given more that has a gradient than hidden states: argument {names}",
        "hidden states alone go from one stage to the next, and their gradient back",
    )


def _seed(number: int, module: nn.Module, args: Any) -> None:
    """Some routers draw numbers: each module draws the same ones, whatever was drawn before."""
    torch.default_generator.manual_seed(number)


def _trace(model: PreTrainedModel) -> ModelTrace:
    tracer = _Tracer(model)
    run_small_model(model).logits.float().square().mean().backward()
    layers = tracer.layers()
    first, last = tracer.around(layers)
    return ModelTrace(StagePlan(layers, first, last), tracer.outputs(layers))


def _lists(model: PreTrainedModel) -> list[str]:
    """The lists of a model's blocks, or, where it does not say what they are, its lists that are in no other."""
    names = {module: name for name, module in model.named_modules()}
    if of_blocks := [names[layers] for _, layers in block_lists(model)]:
        return of_blocks
    lists = [name for module, name in names.items() if isinstance(module, nn.ModuleList) and list(module.parameters())]
    return [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]


class _Tracer:
    """Notes which modules a model calls, and what they return.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._class, self._modules = type(model).__name__, dict(model.named_modules())
        self._of_list = {
            name: [f"{name}.{number}" for number, _ in self._modules[name].named_children()] for name in _lists(model)
        }
        self._calls: list[str] = []
        self._returned: dict[str, int | None] = {}
        self._later = {name for layers in self._of_list.values() for name in layers[1:]}
        self._carried: set[str] = set()
        for name, module in self._modules.items():
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            module.register_forward_hook(partial(self._note_output, name))

    def _note(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._calls.append(name)
        if name in self._later:
            self._carried.update(other_differentiable_args(args, kwargs))

    def _note_output(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        self._returned[name] = len(output) if isinstance(output, tuple) else None

    def layers(self) -> str:
        """Name of the list whose layers run, each once and in order."""
        running = [name for name, layers in self._of_list.items() if not set(self._calls).isdisjoint(layers)]
        if len(running) != 1:
            raise not_splittable(
                f"{self._class} runs {len(running)} lists of layers{': ' * bool(running)}{', '.join(running)}",
                "stages are made of the layers of a single list, each of which passes its hidden states to the next",
            )
        layers = self._of_list[running[0]]
        if [name for name in self._calls if name in layers] != layers:
            raise not_splittable(
                f"{self._class} does not run each layer of {running[0]} once, in order",
                "stages are split between layers that run one after the other",
            )
        return running[0]

    def outputs(self, layers: str) -> int | None:
        """Length of the tuples that the layers return; None: they return tensors."""
        lengths = {self._returned[name] for name in self._of_list[layers]}
        if len(lengths) != 1:
            raise not_splittable(
                f"layers of {self._class} return tuples of several lengths", "all layers return tuples of one length"
            )
        return lengths.pop()

    def around(self, layers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The outermost modules that run before the layers, or not at all, and those that run after them."""
        if self._carried:
            raise carries_more(self._class, sorted(self._carried))
        outside = [n for n, m in self._modules.items() if has_parameters(m) and not n.startswith(f"{layers}.")]
        inner = self._of_list[layers]
        start, stop = self._calls.index(inner[0]), self._calls.index(inner[-1])
        before, between, after = (
            set(outside).intersection(calls)
            for calls in (self._calls[:start], self._calls[start:stop], self._calls[stop:])
        )
        if several := between | (before & after):
            raise not_splittable(
                f"{self._class} uses {', '.join(sorted(several))} between its layers, or both before and after them",
                "a module with parameters is in one stage: a layer's own, or the first or last one's",
            )
        uncalled = {name for name in outside if name not in before | after and _has_gradients(self._modules[name])}
        if direct := uncalled | {name for name in outside if not name or layers.startswith(f"{name}.")}:
            raise not_splittable(
                f"{self._class} uses parameters of {', '.join(sorted(direct)) or 'its own'} without calling a module "
                "that has nothing but them",
                "which modules come before the layers and which after them shows in the calls of modules",
            )
        first, last = ([n for n in outside if (n in after) == is_last] for is_last in (False, True))
        return _outermost(first, [*last, layers]), _outermost(last, [*first, layers])


def _has_gradients(module: nn.Module) -> bool:
    return any(p is not None and p.grad is not None for p in module._parameters.values())


def _outermost(names: list[str], others: list[str]) -> tuple[str, ...]:
    """The outermost modules that hold some of `names` and none of `others`: an embedding, or a whole tower."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        holders = [".".join(parts[:length]) for length in range(1, len(parts))]
        found[next((h for h in holders if not any(f"{o}.".startswith(f"{h}.") for o in others)), name)] = None
    return tuple(found)
