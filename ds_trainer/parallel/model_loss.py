"""The loss of a run on this rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_trainer.config.schema import RunConfig
from ds_trainer.config.stage_assignment import num_stages
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.loss import LossFunction, make_loss
from ds_trainer.models.chunked_cross_entropy import chunk_cross_entropy
from ds_trainer.models.loss_kind import loss_kind, say_whose_loss_counts
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.parallel.pipeline.stages import StagedModel
from ds_trainer.parallel.tensor.vocab_parallel_head import make_cross_entropy


def make_model_loss(
    model: Any,
    split: ModelSplit,
    staged: StagedModel | None,
    config: RunConfig,
    compute_loss_func: Callable | None,
    mesh: Mesh,
) -> LossFunction:
    """Makes the loss; one that is computed in chunks becomes part of the model's forward.

    Args:
        model: This rank's part of the model.
        split: How its parameters are sharded.
        staged: Its pipeline stages; None: there is no pipeline.
        config: The run's config.
        compute_loss_func: The user's loss; None: the config's.
        mesh: Process groups.

    Raises:
        UserError: The model's loss cannot be computed as the config asks.
    """
    has_head = staged is None or num_stages(config.parallel) - 1 in staged.stages
    cross_entropy = make_cross_entropy(model, split, mesh, config.loss.label_smoothing)
    kind = loss_kind(model)
    if kind == "causal_lm" and compute_loss_func is None:
        say_whose_loss_counts(model)
    loss = make_loss(type(model).__name__, kind, config.loss, compute_loss_func, cross_entropy)
    if config.loss.chunk_tokens is not None and has_head:
        chunk_cross_entropy(model, config.loss.chunk_tokens, cross_entropy)
    return loss
