"""Mixtures of experts, and other modules whose own code computes with this rank's shard of their parameters.

Every rank holds a shard of the width of every expert and sees all tokens. So routing is the same on all ranks, and no
token is sent anywhere.

Legend: S tokens, H hidden size, K experts per token, R part of a latent that carries rotary positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.errors import ModelError
from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.patching import mix_in
from ds_trainer.parallel.tensor.collectives import copy_to_group, gather_last_dim, reduce_from_group, sum_gradient
from ds_trainer.parallel.tensor.splitter import Splitter
from ds_trainer.planning.tp_divisibility import Unit
from ds_trainer.planning.tp_plan import generic


class _PartialSums:
    """A module that computes, with its shard of the width, one of the terms whose sum is its output.

    Shapes: hidden states (S, H) and routing weights (S, K), the same on all ranks -> (S, H), the same on all ranks.

    Comm: forward one all-reduce of the output; backward one of each input that needs a gradient; over `sum_group`.
    """

    sum_group: dist.ProcessGroup
    output_biases: tuple[str, ...]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.sum_group
        args = tuple(_entering(value, group) for value in args)
        kwargs = {name: _entering(value, group) for name, value in kwargs.items()}
        with _shared_biases(self, group):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return reduce_from_group(output, group)


class _SharedOutput:
    """A module whose full output each rank computes and whose outputs are summed: each rank gives its fraction."""

    sum_group: dist.ProcessGroup

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.sum_group.size()  # type: ignore[misc]


class _SharedRotaryKeys:
    """A projection to the latent of keys and values, and to the rotary part of the keys, the same for all heads.

    The latent goes on to a column layer, which sums its gradient; the rotary part goes straight to this rank's heads.

    Comm: backward one all-reduce over `heads_group` of the rotary part's gradient, (S, R).

    Source: https://arxiv.org/abs/2405.04434, section 2.1.3
    """

    heads_group: dist.ProcessGroup
    rotary_dim: int

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)  # type: ignore[misc]
        latent, keys_SR = output.split((output.shape[-1] - self.rotary_dim, self.rotary_dim), dim=-1)
        return torch.cat((latent, copy_to_group(keys_SR, self.heads_group)), dim=-1)


class _GatheredVectors:
    """An embedding whose columns are sharded.

    Comm: forward one all-gather of the output over `columns_group`.
    """

    columns_group: dist.ProcessGroup

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return gather_last_dim(super().forward(ids), self.columns_group)  # type: ignore[misc]


def moe_tp_experts(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Sums the outputs of a module whose parameters are sharded along its width, each by its own style."""
    if not isinstance(target, nn.Module):
        raise _misfit(name, target, "moe_tp_experts")
    mix_in(target, _PartialSums)
    target.sum_group, target.output_biases = splitter.group, ()  # type: ignore[assignment]


def moe_output_bias(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Leaves a bias unsharded that a module of style moe_tp_experts adds to its output: each rank adds a fraction."""
    module, _, own = name.rpartition(".")
    experts: Any = splitter.model.get_submodule(module)
    if not isinstance(target, nn.Parameter) or not isinstance(experts, _PartialSums):
        raise _misfit(name, target, "moe_output_bias")
    experts.output_biases += (own,)


def moe_identity_expert(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Divides the output of an expert without parameters by the ranks over which its module's output is summed."""
    if not isinstance(target, nn.Module):
        raise _misfit(name, target, "moe_identity_expert")
    mix_in(target, _SharedOutput)
    target.sum_group = splitter.group  # type: ignore[assignment]


def mla_kv_a_proj(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Leaves the down-projection of multi-head latent attention unsharded; sums gradients that all heads share."""
    rotary_dim = getattr(splitter.config, "qk_rope_head_dim", None)
    if not isinstance(target, nn.Linear) or rotary_dim is None:
        raise _misfit(name, target, "mla_kv_a_proj")
    mix_in(target, _SharedRotaryKeys)
    target.heads_group, target.rotary_dim = splitter.group, rotary_dim  # type: ignore[assignment]


def embedding_colwise(splitter: Splitter, name: str, target: nn.Module | nn.Parameter) -> None:
    """Shards each vector of an embedding, and gathers the output."""
    if not isinstance(target, nn.Embedding):
        raise _misfit(name, target, "embedding_colwise")
    shape = tuple(target.weight.shape)
    splitter.units.append(Unit(f"width of {generic(name)}", shape[1]))
    splitter.shard_parameter(target, "weight", TensorSharding.even(shape, 1, splitter.size))
    mix_in(target, _GatheredVectors)
    target.columns_group = splitter.group  # type: ignore[assignment]


def _entering(value: Any, group: dist.ProcessGroup) -> Any:
    needs_gradient = isinstance(value, torch.Tensor) and value.requires_grad
    return copy_to_group(value, group) if needs_gradient else value


@contextmanager
def _shared_biases(module: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Within the block the module's code finds its output biases divided by the number of ranks."""
    names = module.output_biases
    module.__dict__.update({name: sum_gradient(module._parameters[name], group) / group.size() for name in names})
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]


def _misfit(name: str, target: object, style: str) -> ModelError:
    return ModelError(
        f"style {style} is given to {name}, which is a {type(target).__name__}",
        "moe_tp_experts, all_reduce and moe_identity_expert fit modules, moe_output_bias a parameter of one of the "
        "first two, embedding_colwise an Embedding, mla_kv_a_proj a Linear where config.qk_rope_head_dim is set",
        "give it another style in parallel.tp_plan, or `replicate`",
    )


EXPERT_STYLES = {
    "all_reduce": moe_tp_experts,
    "embedding_colwise": embedding_colwise,
    "mla_kv_a_proj": mla_kv_a_proj,
    "moe_identity_expert": moe_identity_expert,
    "moe_output_bias": moe_output_bias,
    "moe_tp_experts": moe_tp_experts,
}
"""Name of a style -> what it does, as in `styles.STYLES`."""
