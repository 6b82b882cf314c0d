"""A model while tensor parallelism is applied: which modules were replaced, and how each parameter was sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.errors import ModelError
from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.attention import Heads, localize
from ds_trainer.planning.tp_divisibility import Unit, tp_size_problem


class Splitter:
    """Replaces modules and parameters of a model, and records their shardings.

    A tied parameter stays one: `local` returns the same new parameter for each of its users.

    Args:
        model: The model, changed in place.
        group: The tensor-parallel group.

    Attributes:
        units: What the styles assign to ranks undivided, such as heads; `finish` checks that their numbers divide.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.size = group.size()
        self.config = getattr(model, "config", None)
        self.units: list[Unit] = []
        self._places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
        for parent in model.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self._places[child].append((parent, name))
        self._heads: dict[nn.Module, Heads] = {}
        # The old parameters are kept, so that no new one gets an old one's identity.
        self._sharded: dict[int, tuple[nn.Parameter, nn.Parameter, TensorSharding]] = {}

    def parent(self, module: nn.Module) -> nn.Module:
        """The module that holds a module, the first of several."""
        return self._places[module][0][0]

    def swap(self, old: nn.Module, new: nn.Module, shardings: Mapping[str, TensorSharding]) -> None:
        """Replaces a module, wherever it is held.

        Args:
            old: The stock module.
            new: Its parallel layer; its parameters become the shards of the old ones.
            shardings: Name of a parameter of the module -> its sharding; others are not sharded.
        """
        for name, parameter in old._parameters.items():
            if parameter is not None:
                setattr(new, name, self.local(parameter, shardings[name]) if name in shardings else parameter)
        new.train(old.training)
        for parent, name in self._places[old]:
            setattr(parent, name, new)
        self._places[new] = self._places[old]

    def shard_parameter(self, module: nn.Module, name: str, sharding: TensorSharding) -> None:
        """Replaces a parameter of a module by one of local shape."""
        setattr(module, name, self.local(getattr(module, name), sharding))

    def shard_heads(self, module: nn.Module, heads: Heads) -> None:
        """Records that each rank computes some heads of an attention module, which `finish` then reduces to them."""
        self._heads[module] = heads

    def local(self, parameter: nn.Parameter, sharding: TensorSharding) -> nn.Parameter:
        """The parameter of local shape, on meta, that replaces one of the model's; for a tied one always the same."""
        known = self._sharded.get(id(parameter))
        if known is None:
            values = torch.empty(sharding.local_shape, dtype=parameter.dtype, device="meta")
            known = parameter, nn.Parameter(values, parameter.requires_grad), sharding
            self._sharded[id(parameter)] = known
        if known[2] != sharding:
            raise ModelError(
                f"a parameter of shape {tuple(sharding.shape)} is shared by layers that the plan shards differently",
                "a shared parameter is one tensor on each rank",
                "give the layers that share it fitting styles in parallel.tp_plan, such as embedding_rowwise for an "
                "embedding and colwise_gather_output for the head",
            )
        return known[1]

    @property
    def has_sharded(self) -> bool:
        """Whether any parameter has been sharded."""
        return bool(self._sharded)

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is a rank's shard."""
        return any(new is parameter for _, new, _ in self._sharded.values())

    def shardings(self) -> dict[str, TensorSharding]:
        """Parameter name, of a tied one its first name -> its sharding.

        Raises:
            ModelError: A layer that shares a sharded parameter still holds the full one.
        """
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._sharded:
                raise ModelError(
                    f"{name} is shared with a layer that the plan shards, and is itself not in the plan",
                    "a shared parameter is one tensor on each rank",
                    "add a style for it to parallel.tp_plan",
                )
        by_new = {id(new): sharding for _, new, sharding in self._sharded.values()}
        return {name: by_new[id(p)] for name, p in self.model.named_parameters() if id(p) in by_new}

    def finish(self) -> None:
        """Reduces attention modules to this rank's heads, after every style has read their full numbers.

        Raises:
            ModelError: The group's size does not divide the numbers of `units`; the error names the sizes that do.
        """
        if problem := tp_size_problem(self.size, self.units):
            raise ModelError(*problem)
        for module, heads in self._heads.items():
            localize(module, heads, self.group)
