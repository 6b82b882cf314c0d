"""Proves on scaled-down models of a class that its stages, one after the other, compute what the whole model does.

What crosses from one layer to the next beside hidden states, such as indices or a cache that earlier layers fill, is
not always an argument that can be seen. It is lost where a model is cut, and then loss or gradients differ.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_trainer.parallel.pipeline.stages import cut_stages
from ds_trainer.parallel.pipeline.trace_model import MISFITS, Observation, observe, refusal, run_twin, twins

_TOLERANCE = 1e-4
"""Of the largest gradient; fp32, the same operations on the same numbers."""


@cache
def proven(cls: Any, config_class: Any) -> Observation:
    """How a class runs its layers; its models can be cut between any two of them.

    Args:
        cls: The class for causal language models.
        config_class: That of its config.

    Raises:
        ModelError: The class cannot be cut, or not be scaled down; or a cut model fails, or computes something else.
    """
    seen = observe(cls, config_class)
    rule = "all that a layer uses of the layers before it are the hidden states that it is given"
    for whole, cut in zip(twins(cls, config_class), twins(cls, config_class), strict=True):
        _loss(run_twin(whole)).backward()
        depth = len(cut.get_submodule(seen.plan.layers))  # type: ignore[arg-type]
        try:
            cut_stages(cut, seen, [(layer, layer + 1) for layer in range(depth)], range(depth), lambda stage: 0)
            _staged_step(cut, depth)
        except MISFITS as error:
            found = f"{cls.__name__} fails when it is cut between its layers: {type(error).__name__}: {error}"
            raise refusal(found, rule) from error
        if differing := _differing(whole, cut):
            raise refusal(
                f"{cls.__name__}, cut between its layers, has other gradients of {', '.join(differing[:3])}"
                + f" and {len(differing) - 3} more" * (len(differing) > 3),
                rule,
            )
    return seen


def _staged_step(model: Any, depth: int) -> None:
    received, sent = [], []
    hidden = None
    for stage in range(depth):
        output = run_twin(model, pipeline_stage=stage, hidden_states=hidden)
        sent.append(output if stage < depth - 1 else _loss(output))
        hidden = sent[-1].detach().requires_grad_()
        received.append(hidden)
    sent.pop().backward()
    for output, leaf in zip(sent[::-1], received[-2::-1], strict=True):
        output.backward(leaf.grad)


def _loss(outputs: Any) -> torch.Tensor:
    return outputs.logits.float().square().mean()


def _differing(whole: PreTrainedModel, cut: PreTrainedModel) -> list[str]:
    """Names of parameters whose gradients differ."""
    gradients = {name: parameter.grad for name, parameter in cut.named_parameters()}
    largest = max(p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None)
    differing = []
    for name, parameter in whole.named_parameters():
        ours, theirs = (torch.zeros(()) if x is None else x for x in (gradients[name], parameter.grad))
        if not (ours - theirs).abs().max() <= _TOLERANCE * largest:
            differing.append(name)
    return differing
