"""What the parts of a model cost, by the names and shapes of its parameters and by its config.json. Pure.

A checkpoint's headers suffice, as a model's parameters do, so that a run can be planned without loading either. A
checkpoint's names need not be the model's: layers are found by the number in a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

StageRanges = tuple[tuple[int, int], ...]
"""Of every stage, in order, its first layer and the one after its last."""

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
FACTS = (
    *("vocab_size", "hidden_size", "num_attention_heads", "head_dim"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("layer_types", "sliding_window", "use_sliding_window", "attention_chunk_size"),
    *_NUM_LAYERS,
    *_NUM_EXPERTS,
    *_ACTIVE_EXPERTS,
)
"""Keys of config.json that say what a layer costs; a config object of transformers has more of them as attributes."""


@dataclass(frozen=True)
class Costs:
    """An amount, such as FLOPs or parameters, of each part of a model.

    Args:
        first: Of what precedes the layers.
        layers: Of each layer.
        last: Of what follows them.
    """

    first: float
    layers: tuple[float, ...]
    last: float

    def of_stages(self, ranges: StageRanges) -> tuple[float, ...]:
        """The amount of each stage; the first has what precedes the layers, the last what follows them."""
        sums = [sum(self.layers[start:stop]) for start, stop in ranges]
        sums[0] += self.first
        sums[-1] += self.last
        return tuple(sums)


@dataclass(frozen=True)
class ModelParts:
    """A model as a row of layers, and what comes before and after them.

    Args:
        shapes: Name -> shape of every parameter, or of every tensor of a checkpoint; a tied one once.
        facts: Of the language model's config.json at least `FACTS`, as far as it has them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    facts: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        """As config.json says: a checkpoint may have more, that predict further tokens; 0: no name has a number."""
        numbers = self._numbered.get(self._layers or "", {}).values()
        counted = max(numbers, default=-1) + 1
        return min(counted, self._number(_NUM_LAYERS) or counted)

    def summed(self, amounts: Mapping[str, int]) -> Costs:
        """Sums over each part of what `amounts` says of every name, such as its elements."""
        ends = {part: sum(amounts[name] for name, its in self._ends.items() if its == part) for part in (0, -1)}
        layers = [0] * self.num_layers
        for name, number in self._numbered.get(self._layers or "", {}).items():
            if number < len(layers):
                layers[number] += amounts[name]
        return Costs(ends[0], tuple(layers), ends[-1])

    def parameters(self) -> Costs:
        """Parameters of each part; a tied one is the embedding's."""
        return self.summed({name: prod(shape) for name, shape in self.shapes.items()})

    def flops(self, positions: int) -> Costs:
        """FLOPs per token of a forward pass; a backward pass takes twice as many everywhere.

        Two for each weight of a matrix, and in attention two for each key that a query attends to and each feature of a
        key and of a value; masks and windows leave a query fewer keys than there are positions. Of a layer's experts
        those count that a token is sent to. Looking up an embedding takes none, a head as many whether it is tied or
        not.

        Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.

        Args:
            positions: Length of the sequences.
        """
        matrices = self.summed({name: self._of_matrix(name, shape) for name, shape in self.shapes.items()})
        layers = list(matrices.layers)
        for layer in self._attending.intersection(range(len(layers))):
            layers[layer] += 2 * _attended_keys(positions, self._window(layer)) * self._attended_features
        vocabulary = max((prod(shape) for shape in self.shapes.values() if self._is_vocabulary(shape)), default=0)
        return Costs(0, tuple(layers), 2 * vocabulary)

    @cached_property
    def _numbered(self) -> dict[str, dict[str, int]]:
        """What names have before their first number -> name -> number."""
        found: dict[str, dict[str, int]] = {}
        for name in self.shapes:
            if match := re.match(r"(?:(.*?)\.)?(\d+)\.", name):
                found.setdefault(match[1] or "", {})[name] = int(match[2])
        return found

    @cached_property
    def _layers(self) -> str | None:
        """Where the layers are: of several places, as models with a vision tower have, the largest that has them all.

        None: nowhere.
        """
        wanted = self._number(_NUM_LAYERS) or 0

        def rank(place: str) -> tuple[bool, int]:
            names = self._numbered[place]
            return len(set(names.values())) >= wanted, sum(prod(self.shapes[name]) for name in names)

        return max(self._numbered, key=rank, default=None)

    @cached_property
    def _ends(self) -> dict[str, int]:
        """Names outside of all layers -> 0: before them, -1: after them.

        Of two matrices over the vocabulary, which are equally large, one is the embedding and one the head. The rest
        is little: position embeddings come before the layers, norms after.
        """
        inside = {name for names in self._numbered.values() for name in names}
        outside = {name: shape for name, shape in self.shapes.items() if name not in inside}
        vocabularies = [name for name, shape in outside.items() if self._is_vocabulary(shape)]
        is_last = {name: len(shape) < 2 or name in vocabularies[1:] for name, shape in outside.items()}
        return {name: -1 if last else 0 for name, last in is_last.items()}

    @cached_property
    def _attending(self) -> set[int]:
        """Layers with attention whose cost grows with the sequence: not a linear one, nor a state-space model's."""
        names = self._numbered.get(self._layers or "", {}).items()
        named = {number for name, number in names if re.search(r"\d+\..*att(n|ention)", name)}
        return {layer for layer in named if "linear" not in (self._type(layer) or "")}

    def _type(self, layer: int) -> str | None:
        types = self.facts.get("layer_types")
        return str(types[layer]) if isinstance(types, Sequence) and layer < len(types) else None

    def _window(self, layer: int) -> int | None:
        """Most keys that a layer's queries attend to; None: all before them."""
        kind = self._type(layer)
        if kind is not None and "chunked" in kind:
            return self._number(("attention_chunk_size",))
        has_window = self.facts.get("use_sliding_window", True) if kind is None else "sliding" in kind
        return self._number(("sliding_window",)) if has_window else None

    @cached_property
    def _attended_features(self) -> int:
        """Features of a key and of a value over all query heads."""
        heads, width = self._number(("num_attention_heads",)) or 0, self._number(("hidden_size",)) or 0
        usual = self._number(("head_dim",)) or width // max(heads, 1)
        latent = self._number(("qk_nope_head_dim",))
        of_keys = latent + (self._number(("qk_rope_head_dim",)) or 0) if latent else usual
        return heads * (of_keys + (self._number(("v_head_dim",)) or usual))

    def _of_matrix(self, name: str, shape: tuple[int, ...]) -> int:
        if len(shape) < 2:
            return 0
        number, active = self._number(_NUM_EXPERTS), self._number(_ACTIVE_EXPERTS)
        is_of_experts = "experts" in name.split(".") or (len(shape) == 3 and shape[0] == number)
        used, total = (min(active, number), number) if is_of_experts and number and active else (1, 1)
        return 2 * prod(shape) * used // total

    def _is_vocabulary(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[0] == self.facts.get("vocab_size")

    def _number(self, names: Sequence[str]) -> int | None:
        return next((number for name in names if isinstance(number := self.facts.get(name), int)), None)


def _attended_keys(positions: int, window: int | None) -> float:
    """Keys that a query attends to, on average over a sequence: its own, and those before it in its window."""
    window = min(window or positions, positions)
    return (window * (window + 1) / 2 + (positions - window) * window) / positions
