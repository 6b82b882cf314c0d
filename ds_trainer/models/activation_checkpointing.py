"""Activation checkpointing: which activations of a block are kept for its backward pass, and which are recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_trainer.errors import ModelError
from ds_trainer.log import get_logger

_aten = torch.ops.aten
EXPENSIVE = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators whose results selective checkpointing keeps: they take nearly all of a block's time, but little memory."""


def enable_activation_checkpointing(model: PreTrainedModel, how: Literal[True, "selective"]) -> None:
    """Has each block recompute its activations in the backward pass: all of them, or all but results of `EXPENSIVE`.

    Not the reentrant variant: it needs inputs with a gradient, which a frozen embedding does not give, and makes DDP
    mark parameters ready twice.

    Raises:
        ModelError: The model's blocks, or for the selective kind the installed transformers, do not support it.
    """
    arguments: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        _require_hooks_outside()
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # Named gradient_checkpointing_enable before transformers 5.24.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(arguments)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__}: {error}",
            "activations are recomputed by the model's own layers, which must support it",
            "set model.gradient_checkpointing to false",
        ) from error
    what = "activations" if how is True else "activations other than results of matrix products and attention"
    get_logger().info("%s are recomputed in the backward pass; the key-value cache is off", what)


def _require_hooks_outside() -> None:
    """Refuses versions of transformers that recompute a block's hooks: ZeRO-3's gather runs in one pass only."""
    if "__call__" in vars(GradientCheckpointingLayer):
        raise ModelError(
            'model.gradient_checkpointing is "selective", and transformers '
            f"{transformers.__version__} recomputes a block together with its hooks",
            "operators are recomputed one by one, and those of an engine's hooks differ between the passes",
            "set model.gradient_checkpointing to true, or install transformers 5.24 or later",
        )


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
