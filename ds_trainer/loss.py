"""Losses as sums over label tokens; `executors.step` divides them once, by the label tokens of the whole step.

Legend: B samples, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ds_trainer.config.training_sections import LossConfig
from ds_trainer.errors import ConfigError
from ds_trainer.log import warn_once

IGNORE_INDEX = -100
"""Label of a token that is not learned: the default of torch's cross entropy."""

Batch = Mapping[str, Any]


class LossFunction(Protocol):
    """Loss of one micro-batch, as a sum that the executor divides by the step's label tokens."""

    def num_tokens(self, batch: Batch) -> int:
        """Label tokens of this micro-batch."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What the model's forward is called with."""

    def loss_sum(self, outputs: Any, batch: Batch, step_tokens: int) -> torch.Tensor:
        """Sum of the losses over this micro-batch's label tokens.

        Args:
            outputs: What the model returned.
            batch: The micro-batch.
            step_tokens: Label tokens of the step, over all micro-batches and ranks.
        """


def shifted_labels(labels_BT: torch.Tensor) -> torch.Tensor:
    """Labels moved one position to the left, so that logits at t are compared with the token at t + 1."""
    return F.pad(labels_BT[..., 1:], (0, 1), value=IGNORE_INDEX)


class CrossEntropy:
    """Cross entropy, computed in fp32 from the logits of the full vocabulary.

    Args:
        label_smoothing: Weight of the uniform distribution in the target (Szegedy et al. 2016, section 7).
    """

    forward_options: Mapping[str, Any] = {}
    """Further arguments of the model's forward, so that it returns the logits that `sum` takes."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def logits_of(self, head: nn.Module) -> AbstractContextManager[None]:
        """Context in which the head returns the logits that `sum` takes."""
        return nullcontext()

    def sum(self, logits_BTV: torch.Tensor, shifted_labels_BT: torch.Tensor) -> torch.Tensor:
        """Sum over all positions with a label."""
        return F.cross_entropy(
            logits_BTV.float().flatten(0, -2),
            shifted_labels_BT.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )


class CausalLMLoss:
    """Cross entropy of next tokens.

    Args:
        cross_entropy: How it is computed.
    """

    def __init__(self, cross_entropy: CrossEntropy) -> None:
        self.cross_entropy = cross_entropy

    def num_tokens(self, batch: Batch) -> int:
        """Labels other than -100, without the first position, which nothing predicts."""
        return int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Everything but the labels: the loss is computed here."""
        return {k: v for k, v in batch.items() if k != "labels"} | dict(self.cross_entropy.forward_options)

    def loss_sum(self, outputs: Any, batch: Batch, step_tokens: int) -> torch.Tensor:
        """Sum over the label tokens of this micro-batch."""
        return self.cross_entropy.sum(outputs["logits"], shifted_labels(batch["labels"]))


class ChunkedCausalLMLoss(CausalLMLoss):
    """`CausalLMLoss`, computed inside the model's forward, which `models.chunked_cross_entropy` has changed for it."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Everything, the labels already shifted."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return inputs | {"shifted_labels": shifted_labels(batch["labels"])}

    def loss_sum(self, outputs: Any, batch: Batch, step_tokens: int) -> torch.Tensor:
        """What the forward returned."""
        return outputs["loss_sum"]


def with_logits(loss: LossFunction) -> LossFunction:
    """The same loss for a pass whose logits are needed in full."""
    if not isinstance(loss, CausalLMLoss):
        return loss
    return CausalLMLoss(CrossEntropy(loss.cross_entropy.label_smoothing))


class ModelOwnLoss:
    """The loss that a model's forward returns, taken for the mean over its labels other than -100.

    That is what transformers' models return outside causal language modelling; the sum is the mean times the count.
    """

    def num_tokens(self, batch: Batch) -> int:
        """Labels other than -100; floating-point labels count by sample, and not at all where every one is -100."""
        labels = batch["labels"]
        if labels.is_floating_point():
            return labels.shape[0] if bool((labels != IGNORE_INDEX).any()) else 0
        return int((labels != IGNORE_INDEX).sum())

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """All of the batch, labels included."""
        return dict(batch)

    def loss_sum(self, outputs: Any, batch: Batch, step_tokens: int) -> torch.Tensor:
        """The returned mean times this micro-batch's count."""
        count = self.num_tokens(batch)
        # A mean over no label is 0/0; the graph is kept so that every rank runs a backward.
        return outputs["loss"] * count if count else outputs["logits"].sum() * 0.0


class UserLoss:
    """A user's `compute_loss_func(outputs, labels, num_items_in_batch=...)`, as in the Hugging Face Trainer.

    It returns a sum of token losses divided by `num_items_in_batch`, the label tokens of the step over all ranks.

    Args:
        function: The user's function.
        counts_like: Loss whose counting of label tokens applies.
    """

    def __init__(self, function: Callable[..., torch.Tensor], counts_like: LossFunction) -> None:
        self.function = function
        self.counts_like = counts_like

    def num_tokens(self, batch: Batch) -> int:
        """Label tokens as `counts_like` counts them."""
        return self.counts_like.num_tokens(batch)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Everything but the labels, which go to the function."""
        return {key: value for key, value in batch.items() if key != "labels"}

    def loss_sum(self, outputs: Any, batch: Batch, step_tokens: int) -> torch.Tensor:
        """The function's share of the step's mean, times the step's tokens."""
        return self.function(outputs, batch["labels"], num_items_in_batch=step_tokens) * step_tokens


def make_loss(
    model_name: str,
    is_causal_lm: bool,
    config: LossConfig,
    function: Callable[..., torch.Tensor] | None,
    cross_entropy: CrossEntropy,
) -> LossFunction:
    """The loss of a run.

    Args:
        model_name: Name of the model's class.
        is_causal_lm: Whether the model predicts next tokens.
        config: The config's loss section.
        function: The user's `compute_loss_func`.
        cross_entropy: How that of causal language models is computed.

    Raises:
        ConfigError: A key of the section is set for a loss that is not computed here.
    """
    if function is not None or not is_causal_lm:
        _refuse_keys_of_our_loss(
            config, "a compute_loss_func was handed to Trainer" if function else f"{model_name} computes its own loss"
        )
    if config.chunk_tokens is not None:
        return ChunkedCausalLMLoss(cross_entropy)
    base: LossFunction = CausalLMLoss(cross_entropy) if is_causal_lm else ModelOwnLoss()
    if function is not None:
        return UserLoss(function, counts_like=base)
    if not is_causal_lm:
        warn_once(
            f"{model_name} computes its own loss: it is taken as the mean over labels other than {IGNORE_INDEX}, "
            "which is what transformers' models return"
        )
    return base


def _refuse_keys_of_our_loss(config: LossConfig, whose: str) -> None:
    for key, value in (("label_smoothing", config.label_smoothing), ("chunk_tokens", config.chunk_tokens)):
        if value:
            raise ConfigError(
                f"loss.{key} is {value} and {whose}",
                "it is part of the cross entropy of causal language models, which is computed here",
                f"remove loss.{key}, and do what it does inside a compute_loss_func",
            )
