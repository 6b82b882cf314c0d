"""The head of a language model whose vocabulary is sharded over the tensor-parallel group.

Callers of the model get full logits, as from any model of its class. The loss takes this rank's columns alone, so that
no rank ever holds the logits of the full vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.layout import TensorSharding
from ds_trainer.loss import CrossEntropy
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy_sum
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear


class VocabParallelCrossEntropy(CrossEntropy):
    """Cross entropy of logits of which this rank holds some columns.

    Args:
        label_smoothing: As in `CrossEntropy`.
        sharding: Of the head's rows over the tensor-parallel group.
        group: The tensor-parallel group.
    """

    forward_options = {"vocab_parallel": True}

    def __init__(self, label_smoothing: float, sharding: TensorSharding, group: dist.ProcessGroup) -> None:
        super().__init__(label_smoothing, sharding.shape[0])
        self._sharding, self._group = sharding, group

    def logits_of(self, head: nn.Module) -> Any:
        """Context in which the head returns this rank's columns, padding included."""
        return local_logits(head)

    def sum(self, logits_BTV: torch.Tensor, shifted_labels_BT: torch.Tensor) -> torch.Tensor:
        """Sum over all positions with a label, the same on every tensor-parallel rank.

        Comm: as `vocab_parallel_cross_entropy_sum`.
        """
        first = self._group.rank() * self._sharding.length
        return vocab_parallel_cross_entropy_sum(
            logits_BTV, shifted_labels_BT, first, self._sharding.shape[0], self._group, self.label_smoothing
        )


def make_cross_entropy(model: Any, split: ModelSplit, mesh: Mesh, label_smoothing: float) -> CrossEntropy:
    """The cross entropy that fits a model's head.

    Lets the forward of a model whose vocabulary is sharded take `vocab_parallel`: its logits are then this rank's
    columns.

    Args:
        model: The model, split.
        split: How its parameters are sharded.
        mesh: Process groups.
        label_smoothing: Weight of the uniform distribution in the target.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(head, ColumnParallelLinear):
        # What stands in for a head on other stages has the size of a shard.
        return CrossEntropy(label_smoothing, head.out_features if isinstance(head, nn.Linear) else None)
    name = next(name for name, module in model.named_modules() if module is head)
    weight = next(name for name, parameter in model.named_parameters() if parameter is head.weight)

    @wraps(type(model).forward)  # `generate` looks at the signature.
    def forward(self: Any, *args: Any, vocab_parallel: bool = False, **inputs: Any) -> Any:
        if not vocab_parallel:
            return type(self).forward(self, *args, **inputs)
        with local_logits(self.get_submodule(name)):
            return type(self).forward(self, *args, **inputs)

    model.forward = MethodType(forward, model)  # Bound, so that a deep copy of the model runs its own.
    return VocabParallelCrossEntropy(label_smoothing, split.shardings[weight], mesh.tp_group)


@contextmanager
def local_logits(head: Any) -> Iterator[None]:
    """Lets a column-parallel head return this rank's columns inside the block."""
    gathers, head.gather_output = head.gather_output, False
    try:
        yield
    finally:
        head.gather_output = gathers
