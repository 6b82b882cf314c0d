"""Linear cross entropy that never holds the logits of a whole micro-batch, for causal language models of transformers.

A class may do anything to its logits after the head: cap them (Gemma), scale them (Cohere, Granite). So the class's own
forward is run again for each chunk of positions, with two of its modules stood in for: its body, by one that hands out
the chunk's hidden states, and its head, by the bare matrix product.

All chunks run inside one call of the head module. What an engine hangs on modules, such as the gather of a parameter
that ZeRO-3 or FSDP2 has cut over the ranks, therefore acts once in each pass, however many chunks a rank has.

Legend: B samples, T positions, N positions with a label, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.loss import IGNORE_INDEX, CrossEntropy


def chunk_cross_entropy(model: PreTrainedModel, chunk_tokens: int, cross_entropy: CrossEntropy) -> None:
    """Lets the model's forward take `shifted_labels`; it then returns `loss_sum` alone, computed chunk by chunk.

    Without `shifted_labels` the forward is the class's own. To be called before an engine wraps the model.

    Args:
        model: A causal language model, on meta or not.
        chunk_tokens: Positions whose logits exist at a time.
        cross_entropy: Sums the losses of a chunk.

    Raises:
        ModelError: The model is not a body, which makes hidden states, and a matrix above it.
    """
    parts = _Parts(*_body_and_head(model))

    @wraps(type(model).forward)  # `generate` looks at the signature.
    def forward(self: Any, *args: Any, shifted_labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if shifted_labels is None:
            return type(self).forward(self, *args, **inputs)
        outputs = _body_outputs(self, parts, *args, **inputs)
        labelled = shifted_labels != IGNORE_INDEX
        hidden_NH, labels_N = outputs.last_hidden_state[labelled], shifted_labels[labelled]
        return {"loss_sum": _loss_sum(self, parts, type(outputs), hidden_NH, labels_N, chunk_tokens, cross_entropy)}

    model.forward = MethodType(forward, model)  # Bound, so that a deep copy of the model runs its own.


@dataclass(frozen=True)
class _Parts:
    """Where a model keeps its body and its head."""

    body: str
    head: str

    @contextmanager
    def replaced(self, model: nn.Module, body: Callable[..., Any], head: Callable[..., Any]) -> Iterator[None]:
        """Puts functions where the class's forward looks for its body and its head."""
        places = []
        for name, function in ((self.body, body), (self.head, head)):
            parent, _, attribute = name.rpartition(".")
            modules: dict[str, Any] = model.get_submodule(parent)._modules
            places.append((modules, attribute, modules[attribute]))
            modules[attribute] = _StandIn(modules[attribute], function)
        try:
            yield
        finally:
            for modules, attribute, module in places:
                modules[attribute] = module


class _StandIn:
    """Has a module's attributes, which some classes read, but runs `function` and none of the module's hooks."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._function(*args, **inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _body_outputs(model: Any, parts: _Parts, *args: Any, **inputs: Any) -> Any:
    """What the body returns when the class's forward calls it; what comes after it sees no position."""
    body, found = model.get_submodule(parts.body), []

    def record(*body_args: Any, **body_inputs: Any) -> Any:
        outputs = body(*body_args, **body_inputs)
        found.append(outputs)
        return type(outputs)(last_hidden_state=outputs.last_hidden_state[:, :0])

    with parts.replaced(model, record, lambda hidden: hidden):
        type(model).forward(model, *args, **inputs)
    (outputs,) = found
    return outputs


def _loss_sum(
    model: Any,
    parts: _Parts,
    outputs_type: Callable[..., Any],
    hidden_NH: torch.Tensor,
    labels_N: torch.Tensor,
    chunk_tokens: int,
    cross_entropy: CrossEntropy,
) -> torch.Tensor:
    head = model.get_submodule(parts.head)
    logits_of = head.forward

    def chunk_loss(hidden_CH: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        hidden_1CH = hidden_CH.unsqueeze(0)
        outputs = outputs_type(last_hidden_state=hidden_1CH)
        # Entered here, since this runs again in the backward pass.
        with cross_entropy.logits_of(head), parts.replaced(model, lambda *_, **__: outputs, logits_of):
            logits_1CV = type(model).forward(model, inputs_embeds=hidden_1CH).logits
        return cross_entropy.sum(logits_1CV, labels_C)

    def all_chunks(hidden_NH: torch.Tensor) -> torch.Tensor:
        # Without any label there is one empty chunk: every rank has to run a backward pass.
        chunks = zip(hidden_NH.split(chunk_tokens), labels_N.split(chunk_tokens), strict=True)
        losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.stack(losses).sum()

    head.forward = all_chunks
    try:
        return head(hidden_NH)
    finally:
        del head.forward


def _body_and_head(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the module whose output is the last hidden states, and of the matrix that makes logits of them."""
    head = model.get_output_embeddings()
    body = model.get_decoder()
    if body is model or body is head:  # Classes that transformers' own look-up does not know, such as Llama 4's.
        body = next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(p) for module in (body, head) if module is not None for p in module.parameters()}
    others = [name for name, p in model.named_parameters() if id(p) not in inside]
    if body is model or head is None or others:
        raise ModelError(
            f"loss.chunk_tokens is set, and {type(model).__name__} has "
            + (f"parameters beside its body and its head: {', '.join(others[:3])}" if others else "no head of its own"),
            "logits are computed chunk by chunk where one matrix makes them of the last hidden states",
            "remove loss.chunk_tokens",
        )
    return names[id(body)], names[id(head)]
