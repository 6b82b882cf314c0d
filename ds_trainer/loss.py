"""Losses as sums over label tokens; `executors.step` divides them once, by the label tokens of the whole step.

Legend: B samples, T positions, N = B T, V vocabulary, v of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ds_trainer.config.training_sections import LossConfig
from ds_trainer.errors import ConfigError, DataError
from ds_trainer.log import warn_once

IGNORE_INDEX = -100
"""Label of a token that is not learned: the default of torch's cross entropy."""

Batch = Mapping[str, Any]

Reduce = Callable[[torch.Tensor, dist.ReduceOp.RedOpType], torch.Tensor]
"""A tensor's reduction over the ranks that share a vocabulary."""


LossKind = Literal["causal_lm", "mean_of_labels", "unknown"]
"""What a model's labels are of: next tokens; what its own loss is the mean over; or nothing that is known."""


class LossFunction(Protocol):
    """Loss of one micro-batch, as a sum that the executor divides by the step's label tokens."""

    def num_tokens(self, batch: Batch) -> int:
        """Label tokens of this micro-batch."""

    def check(self, batch: Batch, samples: Sequence[int]) -> None:
        """Checks the labels of a micro-batch on the host.

        Args:
            batch: The micro-batch.
            samples: Indices of its samples, for the text.

        Raises:
            DataError: The loss cannot be computed of these labels.
        """

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


def cross_entropy_sum(
    logits_BTv: torch.Tensor,
    labels_BT: torch.Tensor,
    smoothing: float,
    columns: range,
    vocab_size: int,
    reduced: Reduce,
) -> torch.Tensor:
    """Sum of the cross entropies of all positions with a label, in fp32; NaN where a label is no token.

    One kernel for logits that one rank holds and for sharded ones, so that all layouts have the same digits. Torch's
    own loses some where it adds up the exponentials of a large vocabulary: 7e-6 of the loss at 262,144 tokens.

    Shapes: (B, T, v) -> ().

    Args:
        logits_BTv: This rank's columns, of one or more leading dimensions; those behind `columns` are padding.
        labels_BT: Token at each position; -100: none.
        smoothing: Weight of the uniform distribution in the target (Szegedy et al. 2016, section 7).
        columns: Tokens of the columns.
        vocab_size: V.
        reduced: Reduces a tensor over the ranks that hold the other columns.
    """
    return _CrossEntropySum.apply(
        logits_BTv.flatten(0, -2), labels_BT.flatten(), smoothing, columns, vocab_size, reduced
    )


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Nv, labels_N, smoothing, columns, vocab_size, reduced):
        has_label_N = labels_N != IGNORE_INDEX
        is_own_N = has_label_N & (labels_N >= columns.start) & (labels_N < columns.stop)
        own_N1 = (labels_N - columns.start).where(is_own_N, 0).unsqueeze(1)

        largest_N = logits_Nv.new_full(labels_N.shape, -torch.inf, dtype=torch.float32)
        if columns:
            largest_N = logits_Nv[:, : len(columns)].amax(1).float()
        largest_N = reduced(largest_N, dist.ReduceOp.MAX)
        # fp16 and bf16 less fp32 is fp32. All that follows is relative to the largest: large logits lose no digits.
        shifted_Nv = logits_Nv - largest_N.unsqueeze(1)
        real_Nv = shifted_Nv[:, : len(columns)]
        parts = [shifted_Nv.gather(1, own_N1).squeeze(1).where(is_own_N, 0.0)]
        if smoothing:
            parts.append(real_Nv.sum(1))
        parts.append(real_Nv.exp_().sum(1))  # In place: this is the only tensor of its size that is made.
        target_N, *logit_sum_N, exp_sum_N = reduced(torch.stack(parts), dist.ReduceOp.SUM)

        loss_N = exp_sum_N.log() - (1 - smoothing) * target_N
        if smoothing:
            loss_N = loss_N - smoothing / vocab_size * logit_sum_N[0]
        is_token_N = (labels_N >= 0) & (labels_N < vocab_size)
        ctx.save_for_backward(logits_Nv, largest_N, exp_sum_N, has_label_N, is_own_N, own_N1)
        ctx.num_real, ctx.vocab_size, ctx.smoothing = len(columns), vocab_size, smoothing
        return loss_N.where(is_token_N, torch.nan).where(has_label_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits_Nv, largest_N, exp_sum_N, has_label_N, is_own_N, own_N1 = ctx.saved_tensors
        grad_Nv = (logits_Nv[:, : ctx.num_real] - largest_N.unsqueeze(1)).exp_().div_(exp_sum_N.unsqueeze(1))
        if ctx.smoothing:
            grad_Nv -= ctx.smoothing / ctx.vocab_size
        if ctx.num_real:
            grad_Nv.scatter_add_(1, own_N1, (ctx.smoothing - 1) * is_own_N.unsqueeze(1).to(grad_Nv.dtype))
        grad_Nv = grad_Nv.mul_((grad * has_label_N).unsqueeze(1)).to(logits_Nv.dtype)
        if padding := logits_Nv.shape[1] - ctx.num_real:
            grad_Nv = F.pad(grad_Nv, (0, padding))
        return grad_Nv, None, None, None, None, None


class CrossEntropy:
    """Cross entropy, computed in fp32 from the logits of the full vocabulary.

    Args:
        label_smoothing: Weight of the uniform distribution in the target (Szegedy et al. 2016, section 7).
        vocab_size: Tokens that the head has logits of; None: this rank does not hold it.
    """

    forward_options: Mapping[str, Any] = {}
    """Further arguments of the model's forward, so that it returns the logits that `sum` takes."""

    def __init__(self, label_smoothing: float = 0.0, vocab_size: int | None = None) -> None:
        self.label_smoothing, self.vocab_size = label_smoothing, vocab_size

    def logits_of(self, head: nn.Module) -> AbstractContextManager[None]:
        """Context in which the head returns the logits that `sum` takes."""
        return nullcontext()

    def sum(self, logits_BTV: torch.Tensor, shifted_labels_BT: torch.Tensor) -> torch.Tensor:
        """Sum over all positions with a label."""
        size = logits_BTV.shape[-1]
        return cross_entropy_sum(
            logits_BTV, shifted_labels_BT, self.label_smoothing, range(size), size, lambda tensor, _: tensor
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

    def check(self, batch: Batch, samples: Sequence[int]) -> None:
        """Every label is a token that the head has a logit of, or -100."""
        labels, size = batch["labels"], self.cross_entropy.vocab_size
        wrong = (labels < 0) & (labels != IGNORE_INDEX)
        if size is not None:
            wrong |= labels >= size
        if not wrong.any():
            return
        has = "" if size is None else f", and the model's head has {size} rows"
        raise DataError(
            f"{_named(wrong, samples)} the label {int(labels[wrong][0])}{has}",
            f"a label is a token id, from 0 to the number of rows less one, or {IGNORE_INDEX} where nothing is learned",
            "fix the labels that the data set or data_collator returns",
        )

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
    return CausalLMLoss(CrossEntropy(loss.cross_entropy.label_smoothing, loss.cross_entropy.vocab_size))


class ModelOwnLoss:
    """The loss that a model's forward returns, taken for the mean over its labels other than -100.

    That is what transformers' models return outside causal language modelling; the sum is the mean times the count.

    Args:
        model_name: Name of the model's class.
        is_known: Whether the class is known to average over all these labels. One that is not may predict next tokens,
            of which the first position has none.
    """

    def __init__(self, model_name: str, is_known: bool) -> None:
        self._model_name, self._is_known = model_name, is_known

    def check(self, batch: Batch, samples: Sequence[int]) -> None:
        """A class that is not known has no label at a first position: the mean is over as many in either case."""
        labels, ids = batch["labels"], batch.get("input_ids")
        if self._is_known or labels.is_floating_point() or ids is None or labels.shape != ids.shape:
            return
        is_first = torch.zeros_like(labels, dtype=torch.bool)
        is_first[..., 0] = labels[..., 0] != IGNORE_INDEX
        if is_first.any():
            raise DataError(
                f"{_named(is_first, samples)} a label at the first position, and the loss is what the forward of "
                f"{self._model_name} returns, a mean that may leave that position out",
                "means are weighted by the labels that they are over, else they would depend on batch.micro_size",
                f"set the first label of each sample to {IGNORE_INDEX}, hand Trainer a compute_loss_func, or derive "
                f"{self._model_name} from a causal language model of transformers",
            )

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


def _named(wrong: torch.Tensor, samples: Sequence[int]) -> str:
    """The samples with a wrong label, where each is one row of the batch."""
    if len(samples) == wrong.shape[0]:
        rows = wrong.flatten(1).any(1).nonzero().flatten().tolist() if wrong.dim() > 1 else wrong.nonzero().flatten()
        samples = [samples[row] for row in rows]
    return f"sample {samples[0]} has" if len(samples) == 1 else f"samples {list(samples)} have"


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

    def check(self, batch: Batch, samples: Sequence[int]) -> None:
        """What a label means is for the function to say."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Everything but the labels, which go to the function."""
        return {key: value for key, value in batch.items() if key != "labels"}

    def loss_sum(self, outputs: Any, batch: Batch, step_tokens: int) -> torch.Tensor:
        """The function's share of the step's mean, times the step's tokens."""
        return self.function(outputs, batch["labels"], num_items_in_batch=step_tokens) * step_tokens


def make_loss(
    model_name: str,
    kind: LossKind,
    config: LossConfig,
    function: Callable[..., torch.Tensor] | None,
    cross_entropy: CrossEntropy,
) -> LossFunction:
    """The loss of a run.

    Args:
        model_name: Name of the model's class.
        kind: What the model's loss is.
        config: The config's loss section.
        function: The user's `compute_loss_func`.
        cross_entropy: How that of causal language models is computed.

    Raises:
        ConfigError: A key of the section is set for a loss that is not computed here.
    """
    is_causal_lm = kind == "causal_lm"
    if function is not None or not is_causal_lm:
        _refuse_keys_of_our_loss(
            config, "a compute_loss_func was handed to Trainer" if function else f"{model_name} computes its own loss"
        )
    if config.chunk_tokens is not None:
        return ChunkedCausalLMLoss(cross_entropy)
    own = ModelOwnLoss(model_name, kind == "mean_of_labels")
    base: LossFunction = CausalLMLoss(cross_entropy) if is_causal_lm else own
    if function is not None:
        return UserLoss(function, counts_like=base)
    if not is_causal_lm:
        warn_once(
            f"{model_name} is no causal language model of transformers: the loss is what its forward returns, taken "
            f"as the mean over labels other than {IGNORE_INDEX}, which is what transformers' models return"
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
