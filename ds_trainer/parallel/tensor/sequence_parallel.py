"""Sequence parallelism: between attention and MLP each tensor-parallel rank has its own positions of the sequence.

The hidden states are sharded before the first block of a stack of blocks, and gathered behind the last one. What comes
before (embeddings, position ids, masks, rotary embeddings) is computed by the model's own code on the whole
sequence. In a block each module that it calls is one of these:

- pointwise: treats positions one by one (norms, activations, dropout): runs on this rank's positions, and the gradients
  of its parameters are summed over the tensor-parallel group;
- a region: anything else (attention, MLP, experts, mixers): its inputs are gathered, its outputs sharded again.
  In a region that ends in one row layer, that layer reduce-scatters its output instead.

Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.

Legend: tp ranks of the group, B samples, T positions, t positions on a rank (T / tp, rounded up), H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_trainer.errors import ModelError
from ds_trainer.models.transformer_blocks import block_lists, has_parameters, map_hidden_states
from ds_trainer.parallel.patching import mix_in
from ds_trainer.parallel.tensor.block_structure import called_modules, closing_row_layer, final_norm, is_pointwise
from ds_trainer.parallel.tensor.collectives import scatter_sequence
from ds_trainer.parallel.tensor.dropout import draw_seed
from ds_trainer.parallel.tensor.grad_allreduce import PartialGradients, summed_gradients
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from ds_trainer.parallel.tensor.sequence_positions import Positions, gathered, mapped, tensors
from ds_trainer.parallel.tensor.splitter import Splitter

_SHARDING = "sequence_sharding"


def shard_sequences(splitter: Splitter, own_masks: bool) -> None:
    """Lets every stack of blocks of a tensor-parallel model work on sharded sequences.

    A sequence of no more positions than ranks, such as a token that is generated, is not sharded.

    Args:
        splitter: The model, its layers replaced already; changed in place.
        own_masks: Whether the model has dropout, so that each rank draws masks for its own positions.

    Raises:
        ModelError: The model does not say what its blocks are, or skips some of them at random.
    """
    model = splitter.model
    found = list(block_lists(model))
    if not found:
        raise _refusal(
            f"{type(model).__name__} does not say what its blocks are",
            "sequences are sharded before a stack of blocks: a list of modules of a class in `_no_split_modules`",
        )
    for owner, layers in found:
        if getattr(owner, "layerdrop", 0.0):
            raise _refusal(
                f"{type(owner).__name__} has a layerdrop of {owner.layerdrop}, which skips blocks at random",
                "sequences are sharded at the first block and gathered behind the last one",
            )
        if has_parameters(owner):
            raise _refusal(
                f"{type(owner).__name__} has parameters of its own: {', '.join(owner._parameters)}",
                "sequences are sharded at the first block and gathered behind the last one; what is done with each "
                "rank's positions between them has no parameters",
            )
        _Stack(owner, layers, splitter, own_masks)


@dataclass(frozen=True)
class _Sharding:
    """How the sequence that a block is given is sharded.

    Args:
        length: T; None: it is not sharded.
        arguments: Numbers and names of arguments that are this rank's shards, beside the hidden states.
    """

    length: int | None
    arguments: frozenset[int | str]


class _Stack:
    """A stack of blocks whose hidden states are sharded.

    Args:
        owner: The module that runs the blocks.
        layers: The blocks, in order.
        splitter: Knows which parameters are sharded.
        own_masks: Whether each rank draws dropout masks of its own.

    Attributes:
        positions: What the block that runs now works on; None: no block runs, or its sequence is not sharded.
    """

    def __init__(self, owner: nn.Module, layers: nn.ModuleList, splitter: Splitter, own_masks: bool) -> None:
        self.positions: Positions | None = None
        self._group, self._own_masks = splitter.group, own_masks
        self._length: int | None = None
        self._is_sharded = False
        self._shape: tuple[int, ...] = ()
        self._made: list[torch.Tensor] = []
        owner.register_forward_pre_hook(self._begin, with_kwargs=True)
        layers[0].register_forward_pre_hook(self._shard, with_kwargs=True)
        for block in layers:
            block.register_forward_pre_hook(self._pass_on, with_kwargs=True)
            block.register_forward_hook(self._remember)
            self._prepare(block, splitter)
        norm = final_norm(owner, layers)
        if norm is None:
            layers[-1].register_forward_hook(self._gather)
        else:
            self._derive(norm, _FinalNorm)
        for child in owner.children():
            if child not in (layers, norm):
                for module in filter(has_parameters, child.modules()):
                    module.register_forward_pre_hook(self._refuse)
        owner.register_forward_hook(self._end)

    def _begin(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._is_sharded, self._made = False, []  # A forward that failed may have left it otherwise.
        if kwargs.get("output_hidden_states") or getattr(getattr(owner, "config", None), "output_hidden_states", False):
            raise _refusal(
                "output_hidden_states is true",
                "between blocks each rank has the hidden states of its own positions",
            )
        named = [kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
        self._shape = tuple(tensors((named, args, kwargs))[0].shape[:2])

    def _shard(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._is_sharded:
            raise _refusal(
                f"{type(block).__name__} is run again before what the last block returned was used",
                "sequences are sharded at the first block and gathered behind the last one",
            )
        return map_hidden_states(args, kwargs, self._scattered)

    def _scattered(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        if hidden_BTH.shape[:2] != self._shape:
            raise _refusal(
                f"the first block is given hidden states of shape {tuple(hidden_BTH.shape)} for input of shape "
                f"{self._shape}",
                "sequences are sharded along the second dimension of hidden states",
            )
        # With one position on a rank, a mask for all heads would look like hidden states.
        self._is_sharded = hidden_BTH.shape[1] > self._group.size()
        self._length = hidden_BTH.shape[1] if self._is_sharded else None
        return scatter_sequence(hidden_BTH, self._group) if self._is_sharded else hidden_BTH

    def _pass_on(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        sharded = set()
        if self._length is not None:
            made = {tensor.data_ptr() for tensor in self._made}
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor) and self._is_by_position(value):
                    arguments[name] = scatter_sequence(value, self._group)
                    sharded.add(name)
                elif isinstance(value, torch.Tensor) and value.data_ptr() in made:
                    sharded.add(name)
        # As an argument, so that the block is given the same when it is recomputed.
        named = {name: value for name, value in arguments.items() if isinstance(name, str)}
        return tuple(arguments[i] for i in range(len(args))), named | {
            _SHARDING: _Sharding(self._length, frozenset(sharded))
        }

    def _is_by_position(self, x: torch.Tensor) -> bool:
        """Whether a block's argument is floating-point numbers (B, T, ...), to be used beside hidden states."""
        return x.dim() > 2 and x.is_floating_point() and x.shape[:2] == (self._shape[0], self._length)

    def _remember(self, block: nn.Module, args: tuple, output: Any) -> None:
        self._made = tensors(output)

    def _gather(self, block: nn.Module, args: tuple, output: Any) -> Any:
        return (self.joined(output[0]), *output[1:]) if isinstance(output, tuple) else self.joined(output)

    def joined(self, hidden_BtH: torch.Tensor) -> torch.Tensor:
        """The hidden states of all positions; from here on they are not sharded."""
        if self._length is None:
            return hidden_BtH
        self._is_sharded = False
        return gathered(hidden_BtH, self._length, self._group)

    def own_length(self, length: int) -> int:
        """Positions on each rank of a sequence of `length`; one of no more positions than ranks is not sharded."""
        return -(-length // self._group.size()) if length > self._group.size() else length

    def enter(self) -> None:
        """Called before the first block of later pipeline stages: their hidden states arrive sharded."""
        self._is_sharded = self.own_length(self._shape[1]) < self._shape[1]
        self._length = self._shape[1] if self._is_sharded else None

    def leave(self) -> None:
        """Called behind the last block of earlier pipeline stages: their hidden states leave sharded."""
        self._is_sharded, self._made = False, []

    @property
    def is_sharded(self) -> bool:
        """Whether hidden states are sharded now, in a block or between them."""
        return self._is_sharded

    def _refuse(self, module: nn.Module, args: tuple) -> None:
        if self._is_sharded:
            raise _refusal(
                f"a {type(module).__name__} is run between the blocks, or between the last one and its norm",
                "sequences are sharded at the first block and gathered behind the last one; what is done with each "
                "rank's positions between them has no parameters",
            )

    def _end(self, owner: nn.Module, args: tuple, output: Any) -> None:
        self._made = []
        if self._is_sharded:
            raise _refusal(
                f"{type(owner).__name__} does not end with its last block, or its norm",
                "sequences are sharded at the first block and gathered behind the last one",
            )

    @contextmanager
    def inside(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], sharding: _Sharding) -> Iterator[None]:
        """Within the context a block runs on sharded sequences."""
        assert sharding.length is not None
        hidden: list[torch.Tensor] = []
        rest = map_hidden_states(args, kwargs, hidden.append)
        full = [value for name, value in (*enumerate(rest[0]), *rest[1].items()) if name not in sharding.arguments]
        seed = draw_seed() if self._own_masks and block.training else None
        before, self.positions = self.positions, Positions(hidden[0], tensors(full), sharding.length, self._group, seed)
        try:
            with self.positions.block(), summed_gradients(block, self._group):
                yield
        finally:
            self.positions = before

    def summed_gradients(self, module: nn.Module) -> Any:
        """While a module with parameters runs on this rank's positions."""
        return summed_gradients(module, self._group)

    def _prepare(self, block: nn.Module, splitter: Splitter) -> None:
        self._derive(block, _Block)
        for child in called_modules(block):
            if isinstance(child, ColumnParallelLinear):
                self._derive(child, _ColumnOfBlock)
            elif isinstance(child, RowParallelLinear):
                self._derive(child, _RowOfBlock)
            elif is_pointwise(child):
                self._sum_gradients_in(child)
            else:
                self._derive(child, _Region)
                region: Any = child
                if (row := closing_row_layer(child, splitter)) is not None:
                    row.register_forward_pre_hook(self._choose_output, prepend=True)  # Random masks go by it.
                    for part in child.children():  # Its own parameters, such as sinks, are used on all positions.
                        self._sum_gradients_in(part)
                region.ends_in_row = row is not None

    def _sum_gradients_in(self, module: nn.Module) -> None:
        for each in list(module.modules()):
            if any(parameter is not None for parameter in each._parameters.values()) and not isinstance(
                each, ParallelLinear | PartialGradients
            ):
                self._derive(each, _Pointwise)

    def _choose_output(self, row: RowParallelLinear, args: tuple[torch.Tensor, ...]) -> None:
        positions = self.positions
        row.sequence_parallel = (
            positions is not None and positions.exit_width == row.out_features and positions.is_full(args[0])
        )

    def _derive(self, module: Any, behaviour: type) -> None:
        if not isinstance(module, behaviour):
            mix_in(module, behaviour)
            module.stack = self


class _Behaviour:
    """A module of a stack of blocks."""

    stack: _Stack


class _Block(_Behaviour):
    """A block, which is given an argument that says how its sequence is sharded."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharding = kwargs.pop(_SHARDING)
        if sharding.length is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self.stack.inside(self, args, kwargs, sharding):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Region(_Behaviour):
    """A module of a block that works on all positions."""

    ends_in_row: bool

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = self.stack.positions
        shards: list[torch.Tensor] = []
        if positions is not None:
            shards = [x for x in tensors((args, kwargs)) if positions.is_shard(x) or positions.is_flat_shard(x)]
        if positions is None or not shards:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        flat = not any(positions.is_shard(x) for x in shards)
        args, kwargs = mapped((args, kwargs), positions.gathered)
        # What is added to the row layer's output, such as a residual, would have all positions.
        scatters = self.ends_in_row and not flat and len(shards) == 1
        with positions.region(shards[0].shape[-1] if scatters else None):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return mapped(output, lambda x: positions.scattered(x, flat))


class _Pointwise(_Behaviour):
    """A module with parameters that works on a rank's positions: always in a block, or behind a region's row layer."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = self.stack.positions
        x = next(iter(tensors((args, kwargs))), None)
        if positions is None or x is None or (positions.in_region and not (x.dim() == 3 and positions.is_shard(x))):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self.stack.summed_gradients(self):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _FinalNorm(_Behaviour):
    """The norm behind the last block: runs on a rank's positions, which are gathered afterwards."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.stack.is_sharded:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        with self.stack.summed_gradients(self):
            return self.stack.joined(super().forward(x, *args, **kwargs))  # type: ignore[misc]


class _ColumnOfBlock(_Behaviour):
    """A column layer that a block calls itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        positions = self.stack.positions
        if positions is not None and positions.is_flat_shard(x):
            full = gathered(x.unsqueeze(0), x.shape[0] * self.group.size(), self.group)
            return super().forward(full).squeeze(0)  # type: ignore[misc]
        return super().forward(x if positions is None else positions.gathered(x))  # type: ignore[misc]


class _RowOfBlock(_Behaviour):
    """A row layer that a block calls itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.sequence_parallel = self.stack.positions is not None
        if self.sequence_parallel and x.dim() == 2:
            return super().forward(x.unsqueeze(0)).squeeze(0)  # type: ignore[misc]
        return super().forward(x)  # type: ignore[misc]


def stack_of(block: nn.Module) -> _Stack | None:
    """The stack of a block whose hidden states may be sharded; None: without sequence parallelism."""
    return block.stack if isinstance(block, _Block) else None


def _refusal(found: str, rule: str) -> ModelError:
    return ModelError(found, rule, "set parallel.sequence_parallel to false")
