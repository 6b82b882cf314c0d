"""Rotary embeddings whose frequencies depend on a sequence's length, by each sample's own length.

Transformers computes frequencies of the types `longrope` and `dynamic` by the longest sample of a batch, padding
included, and those of `dynamic` also by the batches before it. A sample's loss would then depend on the samples that it
is batched with, so on micro size and ranks. Here each sample has the frequencies that it has alone.

Legend: B samples, T positions of this call, S positions of the attention mask.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from ds_trainer.errors import ModelError


def use_own_lengths(model: nn.Module) -> None:
    """Lets every rotary embedding that depends on lengths compute each sample by itself; others stay as they are.

    Args:
        model: A model of transformers, on meta or not.
    """
    for name, module in list(model.named_modules()):
        if _depends_on_length(module):
            parent, _, leaf = name.rpartition(".")
            _compute_by_sample(model.get_submodule(parent), leaf, module)


def _depends_on_length(module: nn.Module) -> bool:
    types: Any = getattr(module, "rope_type", None) or ()
    names = [types] if isinstance(types, str) else dict(types).values()
    return hasattr(module, "max_seq_len_cached") and any("dynamic" in each or each == "longrope" for each in names)


def _compute_by_sample(parent: nn.Module, leaf: str, rotary: Any) -> None:
    """Replaces a rotary embedding's forward; the module that holds it says which positions are padding."""

    def note_mask(parent: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        getattr(parent, leaf).noted_mask = kwargs.get("attention_mask")

    @wraps(type(rotary).forward)
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def computed(ids: torch.Tensor) -> Any:
            _forget_lengths(self)
            return type(self).forward(self, x, ids, *args, **kwargs)

        mask_BS = self.noted_mask
        if mask_BS is None:
            rows = position_ids.split(1)
        elif not torch.is_tensor(mask_BS) or mask_BS.dim() != 2:
            raise ModelError(
                f"the attention_mask is no tensor of (samples, positions), and the rope type is {self.rope_type}",
                "its frequencies depend on each sample's own length, which such a mask gives",
                "let the data_collator return a 1 for each token and a 0 for each position of padding",
            )
        elif mask_BS.shape[1] <= _original_positions(self):
            return computed(position_ids)
        else:
            ids_BT = position_ids.expand(mask_BS.shape[0], -1)
            last_B1 = (ids_BT * mask_BS[:, -ids_BT.shape[1] :]).amax(1, keepdim=True)
            rows = torch.minimum(ids_BT, last_B1).split(1)  # Positions of padding, which nothing looks at.
        return _concatenated([computed(row) for row in rows])

    rotary.noted_mask = None
    rotary.forward = MethodType(forward, rotary)  # Bound, so that a deep copy of the model runs its own.
    parent.register_forward_pre_hook(note_mask, with_kwargs=True)


def _original_positions(rotary: Any) -> int:
    """Up to this length all samples have the same frequencies."""
    parameters = rotary.config.rope_parameters
    sections = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    stated = (each.get("original_max_position_embeddings") for each in sections)
    return min([rotary.original_max_seq_len, *(each for each in stated if each)])


def _forget_lengths(rotary: Any) -> None:
    """The state before the first batch: `dynamic` keeps the frequencies of the longest one until a short one comes."""
    for layer_type in rotary.rope_type if isinstance(rotary.rope_type, dict) else ("",):
        prefix = layer_type and f"{layer_type}_"
        if getattr(rotary, f"{prefix}max_seq_len_cached", 0) > rotary.original_max_seq_len:
            current = getattr(rotary, f"{prefix}inv_freq")
            setattr(rotary, f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq").to(current.device))
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _concatenated(parts: list[Any]) -> Any:
    """Tensors, or tuples of them, of all samples."""
    if len(parts) == 1:
        return parts[0]
    if torch.is_tensor(parts[0]):
        return torch.cat(parts)
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))
