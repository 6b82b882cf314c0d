"""Cross entropy whose logits exist for one chunk of positions at a time, for causal language models of transformers.

A class may change its logits after the head: cap them (Gemma) or scale them (Cohere, Granite). So the class's own
forward runs again for each chunk of positions, with two of its modules replaced: its body by a function that returns
the chunk's hidden states, and its head by the plain matrix product.

All chunks run inside one call of the head module. Hooks of an engine, such as the all-gather of a parameter that ZeRO-3
or FSDP2 shards, therefore run once in each pass, however many chunks a rank has.

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
    """Makes the model's forward accept `shifted_labels`; it then returns only `loss_sum`, computed chunk by chunk.

    Without `shifted_labels` the class's own forward runs. Call it before an engine wraps the model.

    Args:
        model: A causal language model, on meta or not.
        chunk_tokens: Positions whose logits exist at a time.
        cross_entropy: Sums the losses of a chunk.

    Raises:
        ModelError: The model is not a body, which makes hidden states, with one matrix after it.
    """
    names = _BodyAndHead(*_body_and_head(model))

    @wraps(type(model).forward)  # `generate` looks at the signature.
    def forward(self: Any, *args: Any, shifted_labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if shifted_labels is None:
            return type(self).forward(self, *args, **inputs)
        outputs = _body_outputs(self, names, *args, **inputs)
        labelled = shifted_labels != IGNORE_INDEX
        hidden_NH, labels_N = outputs.last_hidden_state[labelled], shifted_labels[labelled]
        return {"loss_sum": _loss_sum(self, names, type(outputs), hidden_NH, labels_N, chunk_tokens, cross_entropy)}

    model.forward = MethodType(forward, model)  # Bound, so that a deep copy of the model runs on the copy.


@dataclass(frozen=True)
class _BodyAndHead:
    """Names of a model's body and head."""

    body: str
    head: str

    @contextmanager
    def replaced(self, model: nn.Module, body: Callable[..., Any], head: Callable[..., Any]) -> Iterator[None]:
        """Replaces body and head by functions in the class's forward."""
        replaced = []
        for name, function in ((self.body, body), (self.head, head)):
            parent, _, attribute = name.rpartition(".")
            modules: dict[str, Any] = model.get_submodule(parent)._modules
            replaced.append((modules, attribute, modules[attribute]))
            modules[attribute] = _FunctionModule(modules[attribute], function)
        try:
            yield
        finally:
            for modules, attribute, module in replaced:
                modules[attribute] = module


class _FunctionModule:
    """Has the attributes of a module, which some classes read, but calls `function`, without the module's hooks."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._function(*args, **inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _body_outputs(model: Any, names: _BodyAndHead, *args: Any, **inputs: Any) -> Any:
    """Outputs of the body in the class's forward, the rest of which runs on no position."""
    body, found = model.get_submodule(names.body), []

    def record(*body_args: Any, **body_inputs: Any) -> Any:
        outputs = body(*body_args, **body_inputs)
        found.append(outputs)
        return type(outputs)(last_hidden_state=outputs.last_hidden_state[:, :0])

    with names.replaced(model, record, lambda hidden: hidden):
        type(model).forward(model, *args, **inputs)
    (outputs,) = found
    return outputs


def _loss_sum(
    model: Any,
    names: _BodyAndHead,
    outputs_type: Callable[..., Any],
    hidden_NH: torch.Tensor,
    labels_N: torch.Tensor,
    chunk_tokens: int,
    cross_entropy: CrossEntropy,
) -> torch.Tensor:
    head = model.get_submodule(names.head)
    logits_of = head.forward

    def chunk_loss(hidden_CH: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        hidden_1CH = hidden_CH.unsqueeze(0)
        outputs = outputs_type(last_hidden_state=hidden_1CH)
        # Entered in here, since checkpointing runs this again in the backward pass.
        with cross_entropy.logits_of(head), names.replaced(model, lambda *_, **__: outputs, logits_of):
            logits_1CV = type(model).forward(model, inputs_embeds=hidden_1CH).logits
        return cross_entropy.sum(logits_1CV, labels_C)

    def all_chunks(hidden_NH: torch.Tensor) -> torch.Tensor:
        # Without a label there is one empty chunk: every rank has to run a backward pass.
        chunks = zip(hidden_NH.split(chunk_tokens), labels_N.split(chunk_tokens), strict=True)
        losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.stack(losses).sum()

    head.forward = all_chunks
    try:
        return head(hidden_NH)
    finally:
        del head.forward


def _body_and_head(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the module that returns the last hidden states, and of the matrix that computes logits from them."""
    head = model.get_output_embeddings()
    body = model.get_decoder()
    if body is model or body is head:  # Classes that `get_decoder` does not handle, such as Llama 4's.
        body = next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(p) for module in (body, head) if module is not None for p in module.parameters()}
    others = [name for name, p in model.named_parameters() if id(p) not in inside]
    if body is model or head is None or others:
        raise ModelError(
            f"loss.chunk_tokens is set, and {type(model).__name__} has "
            + (f"parameters beside its body and its head: {', '.join(others[:3])}" if others else "no separate head"),
            "logits are computed chunk by chunk where one matrix computes them from the last hidden states",
            "remove loss.chunk_tokens",
        )
    return names[id(body)], names[id(head)]
