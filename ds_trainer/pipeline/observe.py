"""What a class of causal language models does around its layers, seen on scaled-down models of the class.

A list of modules does not say which of them run before the layers and which after, or what a layer returns; both also
change between versions of transformers. So a model of the class with a few thousand parameters runs once, watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.models.blocks import has_parameters, stacks, with_hidden_states
from ds_trainer.models.scaled_down import VOCAB, scaled_down
from ds_trainer.pipeline.plan import StagePlan

MIN_LAYERS = 3  # A first one, a last one, and one that is neither.
_SHAPE = (2, 7)
_MISFITS = (
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
"""What a class may raise whose sizes do not fit one another, or that lacks a library."""


@dataclass(frozen=True)
class Observation:
    """How a class runs its layers.

    Args:
        plan: The outermost modules that it uses before and after them. Those that text does not reach, such as a tower
            for images, count as before.
        outputs: Length of the tuple that a layer returns, hidden states first; None: it returns them alone.
    """

    plan: StagePlan
    outputs: int | None


@cache
def observe(cls: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> Observation:
    """Runs scaled-down models of a class and sees in which order their modules are called.

    Args:
        cls: The class for causal language models.
        config_class: That of its config.

    Raises:
        ModelError: The class cannot be cut between its layers, or not be scaled down.
    """
    try:
        seen = [_observe(twin) for twin in twins(cls, config_class)]
    except _MISFITS as error:
        raise refusal(
            f"{cls.__name__} does not run with a scaled-down config: {type(error).__name__}: {error}",
            "a small model of the class is run before it is cut, to see what comes before and after its layers",
        ) from error
    (layers,) = {each.plan.layers for each in seen}
    (outputs,) = {each.outputs for each in seen}
    first = dict.fromkeys(name for each in seen for name in each.plan.first)
    last = dict.fromkeys(name for each in seen for name in each.plan.last)
    return Observation(StagePlan(layers, tuple(first), tuple(last)), outputs)


def twins(cls: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> Iterator[PreTrainedModel]:
    """Scaled-down models of a class with random values, the same each time, without dropout."""
    for config in scaled_down(config_class, MIN_LAYERS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield cls(deepcopy(config)).eval()


def run_twin(twin: Any, **inputs: Any) -> Any:
    """What a scaled-down model makes of some tokens, the same ones each time."""
    input_ids = torch.randint(3, VOCAB, _SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # Some routers draw numbers.
        return twin(input_ids=input_ids, use_cache=False, **inputs)


def refusal(found: str, rule: str) -> ModelError:
    """The error about a model that cannot be cut into stages."""
    return ModelError(found, rule, "set parallel.pp to 1; FSDP2, ZeRO and parallel.tp cut every layer instead")


def layers_of(model: PreTrainedModel) -> str:
    """Name of a model's list of layers.

    Raises:
        ModelError: It has none, or several.
    """
    names = {module: name for name, module in model.named_modules()}
    found = [names[layers] for _, layers in stacks(model)] or _outermost_lists(model)
    if len(found) != 1:
        raise refusal(
            f"{type(model).__name__} has {len(found)} lists of layers{': ' * bool(found)}{', '.join(found)}",
            "stages are cut between the layers of a single list, each of which hands its hidden states to the next",
        )
    return found[0]


def _outermost_lists(model: PreTrainedModel) -> list[str]:
    """Lists of modules that are in no other list, of a model that does not say what its blocks are."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _observe(twin: PreTrainedModel) -> Observation:
    layers = layers_of(twin)
    watch = _Watch(twin, layers)
    run_twin(twin).logits.float().square().mean().backward()
    first, last = watch.around()
    return Observation(StagePlan(layers, first, last), watch.outputs())


class _Watch:
    """Notes what a model calls.

    Args:
        twin: The model.
        layers: Name of its list of layers.
    """

    def __init__(self, twin: PreTrainedModel, layers: str) -> None:
        self._twin, self._class, self._list = twin, type(twin).__name__, layers
        self._layers = [f"{layers}.{name}" for name, _ in twin.get_submodule(layers).named_children()]
        self._modules = {
            name: module
            for name, module in twin.named_modules()
            if has_parameters(module) and not name.startswith(f"{layers}.")
        }
        self._calls: list[str] = []
        self._returned: set[int | None] = set()
        self._carried: set[str] = set()
        for name in (*self._modules, *self._layers):
            twin.get_submodule(name).register_forward_pre_hook(
                lambda module, args, kwargs, name=name: self._note(name, args, kwargs), with_kwargs=True
            )
        for name in self._layers:
            twin.get_submodule(name).register_forward_hook(self._note_output)

    def _note(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self._calls.append(name)
        if name in self._layers[1:]:
            others = with_hidden_states(args, kwargs, lambda hidden: None)
            for argument, value in (*enumerate(others[0]), *others[1].items()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    self._carried.add(str(argument))

    def _note_output(self, layer: nn.Module, args: tuple, output: Any) -> None:
        self._returned.add(len(output) if isinstance(output, tuple) else None)

    def outputs(self) -> int | None:
        """Length of the tuples that the layers return; None: they return tensors."""
        if len(self._returned) != 1:
            raise refusal(f"layers of {self._class} return tuples of several lengths", "layers return the same")
        return next(iter(self._returned))

    def around(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the modules with parameters before the layers, and after them."""
        if [name for name in self._calls if name in self._layers] != self._layers:
            raise refusal(
                f"{self._class} does not run each layer of {self._list} once, in order",
                "stages are cut between layers that run one after the other",
            )
        if self._carried:
            raise refusal(
                f"layers of {self._class} are given more that has a gradient than hidden states: argument "
                f"{', '.join(sorted(self._carried))}",
                "hidden states alone go from one stage to the next, and their gradient back",
            )
        start, stop = self._calls.index(self._layers[0]), self._calls.index(self._layers[-1]) + 1
        before, between, after = map(set, (self._calls[:start], self._calls[start:stop], self._calls[stop:]))
        if several := (between - set(self._layers)) | (before & after):
            raise refusal(
                f"{self._class} uses {', '.join(sorted(several))} at several places before, between or after its "
                "layers",
                "a module with parameters is in one stage: a layer's own, or the first or last one's",
            )
        owners = {name for name in self._modules if not name or self._list.startswith(f"{name}.")}
        uncalled = self._modules.keys() - before - after
        used = {
            name
            for name in uncalled
            if any(p.grad is not None for p in self._modules[name]._parameters.values() if p is not None)
        }
        if direct := owners | used:
            raise refusal(
                f"{self._class} uses parameters of {', '.join(sorted(direct))} without calling a module that has them",
                "what is before the layers and what after them is told by the modules that are called",
            )
        # The order is that of the model.
        first = [name for name in self._modules if name not in after]
        last = [name for name in self._modules if name in after]
        return _outermost(first, [*last, self._list]), _outermost(last, [*first, self._list])


def _outermost(names: list[str], others: list[str]) -> tuple[str, ...]:
    """The outermost modules that hold some of `names` and none of `others`: an embedding, or a whole tower."""
    found = {}
    for name in names:
        parts = name.split(".")
        holders = [".".join(parts[:length]) for length in range(1, len(parts))]
        found[next((h for h in holders if not any(f"{o}.".startswith(f"{h}.") for o in others)), name)] = None
    return tuple(found)
