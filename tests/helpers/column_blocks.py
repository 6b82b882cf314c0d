"""An MLP and an attention of a few numbers, and their shards on a rank with the column layers in one group."""

import torch
import torch.nn.functional as F
from torch import nn

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.collectives import gather_sequence, scatter_sequence
from ds_trainer.parallel.tensor.column_linear_group import ColumnGroup
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tests.helpers.threads import fill

B, T, H, F_, HEADS = 2, 6, 12, 24, 12


class MLP(nn.Module):
    """Gated, as Llama's."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(H, F_, bias=False), nn.Linear(H, F_, bias=False)
        self.out = nn.Linear(F_, H, bias=False)

    def forward(self, x):
        return self.out(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal, with heads of width 1, so that any number of ranks divides them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(H, H, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


BLOCKS = [MLP, Attention]


def make(kind):
    block = kind()
    for seed, parameter in enumerate(block.parameters()):  # Ranks that are threads share the default generator.
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data = values / parameter.shape[1] ** 0.5
    return block


def split(block, group, sequence_parallel=False, keep=False):
    """The block's part on a rank, its column layers in one group."""
    part, columns = type(block)(), []
    for name, layer in block.named_children():
        shape = tuple(layer.weight.shape)
        sharding = TensorSharding.even(shape, int(name == "out"), group.size())
        kind = RowParallelLinear if name == "out" else ColumnParallelLinear
        parallel = fill(kind.from_module(layer, sharding, group), layer, weight=sharding)
        setattr(part, name, parallel)
        if name != "out":
            columns.append(parallel)
    part.out.sequence_parallel = sequence_parallel
    ColumnGroup(columns, group).keep_gathered_input = keep
    return part


def gathered(x_BTH, group):
    """This rank's positions, and all of them gathered from these, as sequence parallelism hands them to a region."""
    shard = scatter_sequence(x_BTH, group).requires_grad_()
    x = gather_sequence(shard, x_BTH.shape[1], group)
    x.sequence_shard = shard
    return shard, x
