"""An embedding whose rows are sharded over the tensor-parallel ranks.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.

Legend: B samples, T positions, V tokens, v those on a rank, H size of an embedding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.patching import mix_in
from ds_trainer.parallel.tensor.collectives import reduce_from_group


class VocabParallelEmbedding:
    """A mixin before an embedding's class, whose forward it calls with the tokens that this rank has.

    What that class does beyond the look-up, such as scaling, must treat each token by itself.

    Shapes: weight (v, H) on each rank; (B, T) -> (B, T, H) on all.

    Comm: forward one all-reduce over `group`, the output's bytes.

    Attributes:
        group: The tensor-parallel group.
        first: The first token whose row this rank has.
    """

    group: dist.ProcessGroup
    first: int
    num_embeddings: int

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Embeddings of tokens."""
        # No rank leaves out a token that none has: there is none below the first rank's, none above the last one's.
        first = self.first if self.group.rank() > 0 else -math.inf
        end = self.first + self.num_embeddings if self.group.rank() < self.group.size() - 1 else math.inf
        others = (input < first) | (input >= end)
        own = (input - self.first).masked_fill(others, 0)
        embedded = super().forward(own, *args, **kwargs)  # type: ignore[misc]
        return reduce_from_group(embedded.masked_fill(others.unsqueeze(-1), 0.0), self.group)


def make_vocab_parallel(module: nn.Embedding, sharding: TensorSharding, group: dist.ProcessGroup) -> None:
    """Gives an embedding in place this rank's rows, on meta, and the forward that goes with them.

    Args:
        module: The embedding, of the stock class or one derived from it.
        sharding: Of its weight: by rows, in the order of the ranks.
        group: The tensor-parallel group.
    """
    mix_in(module, VocabParallelEmbedding)
    first = group.rank() * sharding.length
    module.__dict__ |= {"group": group, "first": first, "num_embeddings": sharding.length}
    if module.padding_idx is not None:  # Its row gets no gradient, on the rank that has it.
        local = module.padding_idx - first
        module.padding_idx = local if 0 <= local < sharding.length else None
    weight = module.weight.new_empty(sharding.local_shape, device="meta")
    module.weight = nn.Parameter(weight, module.weight.requires_grad)
