"""Checks the entries of `parallel.tp_plan` against the model and the plan of its type, as far as that is possible.

Names and styles are checked before the first step, shapes in it. Neither verifies that a plan is right.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.planning.tp_plan import TensorPlan, generic

_ROWS = ("rowwise", "packed_rowwise")
_LOCAL = ("colwise", "packed_colwise", "qkv_colwise", *_ROWS)
"""Styles under which activations beside a layer are this rank's part."""

_HEAD_BY_VOCABULARY = ("colwise", "colwise_gather_output")
_HEAD = (*_HEAD_BY_VOCABULARY, "rowwise_split_input", "replicate")
_EMBEDDING = ("embedding_rowwise", "embedding_colwise", "replicate", None)
_SUMMED = ("moe_tp_experts", "all_reduce")
_PARTIAL = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of layers whose output this rank uses for its own part."""


def check_tied(plan: TensorPlan, model: Any) -> None:
    """Refuses styles of a tied embedding and head that one parameter cannot have.

    Args:
        plan: The plan, with the config's entries.
        model: The model, not split yet.

    Raises:
        ModelError: Unless both are sharded by the vocabulary, or neither is sharded.
    """
    embedding, head = _embedding_and_head(model)
    if embedding is None or head is None:
        return
    if model.get_submodule(embedding)._parameters.get("weight") is not model.get_submodule(head).weight:
        return
    of_embedding, of_head = plan.style_of(embedding), plan.style_of(head)
    if of_embedding not in _EMBEDDING:
        return  # It fits no embedding, whatever the head is.
    if of_head in _HEAD_BY_VOCABULARY:
        fits = of_embedding in ("embedding_rowwise", None)
    else:
        fits = of_head in ("replicate", None) and of_embedding in ("replicate", None)
    if not fits:
        raise ModelError(
            f"{embedding} and {head} share one parameter, and the plan gives {embedding} "
            f"{_given(plan, embedding)} and {head} {_given(plan, head)}",
            "a shared parameter is one tensor on each rank: both layers are sharded by the vocabulary, or neither is",
            f'in parallel.tp_plan give {{"{embedding}": "embedding_rowwise", "{head}": "colwise_gather_output"}}, or '
            'both "replicate"',
        )


def check_user_plan(plan: TensorPlan, targets: Mapping[str, nn.Module | nn.Parameter], model: Any) -> None:
    """Refuses entries of the config's plan that would make the model compute something else.

    Args:
        plan: The plan, with the config's entries.
        targets: The model's modules and parameters by name.
        model: The model.

    Raises:
        ModelError: For the first misfit.
    """
    if not plan.override:
        return
    styles = {name: style for name in targets if (style := plan.style_of(name)) is not None}
    _, head = _embedding_and_head(model)
    _check_head(plan, head)
    _check_blocks(plan, targets)
    local = [name for name, style in styles.items() if style in _LOCAL and name != head]
    _check_sums(plan, styles, targets, local)
    _check_partial(plan, styles, local)
    _check_whole(plan, styles, local)


def _embedding_and_head(model: Any) -> tuple[str | None, str | None]:
    """Names of the modules."""
    if not isinstance(model, PreTrainedModel):
        return None, None
    found: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {module: name for name, module in model.named_modules()}
    embedding, head = (None if module is None else names.get(module) for module in found)
    return embedding, head


def _check_head(plan: TensorPlan, head: str | None) -> None:
    if head is not None and plan.entry_of(head) is not None and plan.style_of(head) not in _HEAD:
        raise ModelError(
            f"{head}, the head, is given {_given(plan, head)}",
            f"a head reads full hidden states and gives one row of logits: its styles are {', '.join(_HEAD)}",
            f"give {head} one of these in parallel.tp_plan, or remove the entry",
        )


def _check_blocks(plan: TensorPlan, targets: Mapping[str, nn.Module | nn.Parameter]) -> None:
    """Layers that the type's plan shards in one module follow one another: they are sharded together or not at all."""
    blocks: dict[str, dict[str, str]] = defaultdict(dict)
    for name in targets:
        if (own := plan.styles.get(generic(name))) in _LOCAL:
            blocks[name.rpartition(".")[0]][name] = own
    for block, members in blocks.items():
        if all(plan.style_of(name) not in _LOCAL for name in members):
            continue
        for name, own in members.items():
            style = plan.style_of(name)
            fits = style in _LOCAL if isinstance(targets[name], nn.Parameter) else style == own
            if not fits:
                others = ", ".join(other.rpartition(".")[2] for other in members if other != name)
                raise ModelError(
                    f"{name} is given {_given(plan, name)}, and the plan of the model's type shards it by {own}, "
                    f"{f'together with {others}' if others else 'as its module needs it'}",
                    "the sharded layers of a module follow one another: each keeps its style, or none is sharded",
                    f'remove the entry from parallel.tp_plan, or do not shard the module, with {{"{generic(block)}.*": '
                    '"replicate"}',
                )


def _check_sums(
    plan: TensorPlan,
    styles: Mapping[str, str],
    targets: Mapping[str, nn.Module | nn.Parameter],
    local: Iterable[str],
) -> None:
    """A module's output is summed over the ranks once, and only where each rank computes one term of it."""
    for name, style in styles.items():
        if style not in _SUMMED:
            continue
        inside = [other for other in local if other.startswith(f"{name}.")]
        rows = [other for other in inside if styles[other] in _ROWS and isinstance(targets[other], nn.Module)]
        if not inside or (rows and plan.entry_of(name) is not None):
            raise ModelError(
                f"{name} has {_given(plan, name)}, and "
                + (f"{rows[0]} sums its output already" if inside else "no layer inside it is sharded"),
                f"{style} sums a module's outputs over the tensor-parallel ranks, each of which computes one term",
                f"remove the entry from parallel.tp_plan, or give {generic(name)} `replicate`",
            )


def _check_partial(plan: TensorPlan, styles: Mapping[str, str], local: Iterable[str]) -> None:
    """A gradient is summed over the ranks only where each computes one term of it."""
    places = {name.rpartition(".")[0] for name in local}
    places |= {name for name, style in styles.items() if style == "embedding_rowwise"}
    for name, style in styles.items():
        if style in _PARTIAL and not places & set(_ancestors(name)):
            raise ModelError(
                f"{name} has {_given(plan, name)}, and no module that holds it has layers that are sharded",
                f"{style} sums gradients over the tensor-parallel ranks; outside of sharded layers each rank has the "
                "full gradient, and the sum would be as many times too large as there are ranks",
                f"give {generic(name)} `replicate` in parallel.tp_plan, or no style",
            )


def _check_whole(plan: TensorPlan, styles: Mapping[str, str], local: Iterable[str]) -> None:
    """An entry must not be without effect: a style is that of the modules which it names, not of what these hold."""
    matches: dict[str, list[str]] = defaultdict(list)
    for name, style in styles.items():
        if style == "replicate" and (entry := plan.entry_of(name)) is not None:
            matches[entry].append(name)
    holders = {ancestor: name for name in local for ancestor in _ancestors(name)}
    for entry, names in matches.items():
        if all(name in holders for name in names):
            raise ModelError(
                f'entry "{entry}" of parallel.tp_plan gives {names[0]} the style replicate, and inside it '
                f"{holders[names[0]]} is sharded",
                "a style is that of the modules which an entry names, not of the layers inside them",
                f'to leave those unsharded give "{entry}.*" the style replicate in parallel.tp_plan',
            )


def _ancestors(name: str) -> list[str]:
    """Names of the modules that hold a module or parameter, including the model's, which is empty."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _given(plan: TensorPlan, name: str) -> str:
    """A style, and where it comes from."""
    entry, style = plan.entry_of(name), plan.style_of(name)
    if entry is not None:
        return f'style {style} (entry "{entry}" of parallel.tp_plan)'
    return "no style" if style is None else f"style {style} (plan of the model's type)"


def report_misfits_of_first_forward(model: nn.Module, plan: TensorPlan) -> None:
    """Until a forward pass has succeeded, layers whose shapes do not fit raise an error that names the plan.

    Args:
        model: The model, sharded; of a model with a head the module below it is checked.
        plan: The plan, with the config's entries.
    """
    watched: Any = model.base_model if isinstance(model, PreTrainedModel) else model

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(self).forward(self, *args, **kwargs)
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except RuntimeError as error:
            if not re.search(r"\b(shape|size)s?\b", str(error)):
                raise
            raise ModelError(
                f"layers do not fit one another in the first forward pass: {str(error).splitlines()[0]}",
                "layers that follow one another are sharded together: the output shard of one is the next one's input",
                f"change or remove entries of parallel.tp_plan, which has {', '.join(map(repr, plan.override))}; at "
                "parallel.tp = 1, where no plan is used, the model must run",
            ) from error

    def succeeded(module: Any, args: Any, output: Any) -> None:
        if (
            getattr(vars(module).get("forward"), "__func__", None) is forward
        ):  # Another one that was put there later stays.
            del module.forward
        hook.remove()

    watched.forward = MethodType(forward, watched)
    hook = watched.register_forward_hook(succeeded)
