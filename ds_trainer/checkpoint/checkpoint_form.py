"""A model's tensors as a Hugging Face checkpoint holds them: transformers' names, tied ones once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from ds_trainer.models.conversions import Conversion, export_conversions, tied_groups
from ds_trainer.models.torch_wrappers import unwrapped_name


class CheckpointNames:
    """The names under which transformers saves the tensors of a model.

    Args:
        meta_model: The model's copy on meta.
    """

    def __init__(self, meta_model: PreTrainedModel) -> None:
        self.known = set(meta_model.state_dict())
        self._kept = {name: name for name, _ in meta_model.named_parameters(remove_duplicate=False)}
        copies = meta_model.get_expanded_tied_weights_keys(all_submodels=True)
        for names in tied_groups(meta_model):
            main = next((name for name in names if name not in copies), names[0])
            self._kept |= dict.fromkeys(names, main)

    def of(self, given: str) -> str:
        """The name of a tensor that a model whose layers torch may have wrapped calls `given`."""
        name = unwrapped_name(given, self.known)
        return self._kept.get(name, name)


def to_checkpoint_form(
    tensors: Iterable[tuple[str, torch.Tensor]], model: PreTrainedModel, meta_model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reverts the conversions of transformers; holds tensors only until the others of their conversion have come.

    Args:
        tensors: Parameters and persistent buffers in full, by their names in the model.
        model: The model.
        meta_model: Its copy on meta, whose dtypes the tensors get.
    """
    names = CheckpointNames(meta_model)
    dtypes = {name: tensor.dtype for name, tensor in meta_model.state_dict().items()}
    conversions = _conversions(model, meta_model, names)
    by_source = {name: conversion for conversion in conversions for _, name in conversion.sources}
    waiting: dict[str, torch.Tensor] = {}
    for given, tensor in tensors:
        name = names.of(given)
        if name not in by_source:  # The class does not save it.
            continue
        waiting[name] = tensor.to(dtypes[name])
        conversion = by_source[name]
        if all(source in waiting for _, source in conversion.sources):
            made = conversion.run(waiting.pop, meta_model)
            yield from made.items()


def _conversions(model: PreTrainedModel, meta_model: PreTrainedModel, names: CheckpointNames) -> list[Conversion]:
    """Conversions for everything that the class saves, a tied parameter once."""
    ignored = set(model._keys_to_ignore_on_save or ())
    saved = [name for name in meta_model.state_dict() if names.of(name) == name and name not in ignored]
    return export_conversions(model, saved)
