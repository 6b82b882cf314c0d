"""A model while it is being split: what has been put in the place of what, and how each parameter was cut."""

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
    """Swaps modules and parameters of a model, and remembers the cuts.

    A parameter that is tied stays one: who asks for the cut of one that has been cut gets the same new one.

    Args:
        model: The model, changed in place.
        group: The tensor group.

    Attributes:
        units: What the styles dealt out whole, for `check_sizes`.
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
        """Puts a module in the place of another, wherever that is held.

        Args:
            old: The stock module.
            new: Its parallel layer; its parameters become the old ones, cut.
            shardings: Name of a parameter of the module -> its cut; another stays whole.
        """
        for name, parameter in old._parameters.items():
            if parameter is not None:
                setattr(new, name, self.local(parameter, shardings[name]) if name in shardings else parameter)
        new.train(old.training)
        for parent, name in self._places[old]:
            setattr(parent, name, new)
        self._places[new] = self._places[old]

    def shard_parameter(self, module: nn.Module, name: str, sharding: TensorSharding) -> None:
        """Puts a parameter of local shape in the place of one of a module's own."""
        setattr(module, name, self.local(getattr(module, name), sharding))

    def shard_heads(self, module: nn.Module, heads: Heads) -> None:
        """Notes that each rank computes some heads of an attention module, which `finish` then tells the module."""
        self._heads[module] = heads

    def local(self, parameter: nn.Parameter, sharding: TensorSharding) -> nn.Parameter:
        """A parameter of local shape on meta in the place of one of the model's; for a tied one always the same."""
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
        """Whether any parameter has been cut."""
        return bool(self._sharded)

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is a rank's part of one."""
        return any(new is parameter for _, new, _ in self._sharded.values())

    def shardings(self) -> dict[str, TensorSharding]:
        """Parameter name, of a tied one its first name -> its cut.

        Raises:
            ModelError: A parameter that was cut is still held whole by a layer that shares it.
        """
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._sharded:
                raise ModelError(
                    f"{name} is shared with a layer that the plan cuts, and is itself not in the plan",
                    "a shared parameter is one tensor on each rank",
                    "add a style for it to parallel.tp_plan",
                )
        by_new = {id(new): sharding for _, new, sharding in self._sharded.values()}
        return {name: by_new[id(p)] for name, p in self.model.named_parameters() if id(p) in by_new}

    def finish(self) -> None:
        """Tells attention modules that their heads are this rank's, once every style has seen those of the whole.

        Raises:
            ModelError: The size of the group does not divide what was dealt out; with the sizes that work.
        """
        if text := tp_size_problem(self.size, self.units):
            raise ModelError(*text)
        for module, heads in self._heads.items():
            localize(module, heads, self.group)
