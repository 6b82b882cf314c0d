"""Conversions between checkpoint tensors and model tensors, which transformers renames, merges and splits on load.

A conversion says which tensors are made from which, in both directions; the operations on values are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Conversion:
    """Makes one group of tensors from another.

    Args:
        target: Name of the tensor made; the first name where a converter makes several.
        converter: Merges, splits or transposes; None where a tensor only changes its name.
        rename: Applied to the names that the converter gives.
        sources: Pattern of the converter and name of each source tensor, in transformers' order.
    """

    target: str
    converter: WeightConverter | None
    rename: Callable[[str], str] = str
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def operations(self) -> str:
        """Names of the converter's operations, for messages; empty for a rename."""
        return ", ".join(type(op).__name__ for op in self.converter.operations) if self.converter else ""

    def run(self, get: Callable[[str], torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Makes the tensors.

        Args:
            get: Returns the value of a source.
            model: Model on meta whose parameters have the shapes that some operations look up.

        Returns:
            Name -> tensor; values on meta give shapes only.
        """
        if self.converter is None:
            return {self.target: get(self.sources[0][1])}
        converter = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, get(name))  # type: ignore[arg-type]  # Tensors are taken too.
        made = converter.convert(self.target, model=model, config=model.config)
        return {self.rename(name): t[0] if isinstance(t, list) else t for name, t in made.items()}


def load_conversions(
    meta_model: PreTrainedModel, names: Iterable[str]
) -> tuple[list[Conversion], list[str], list[WeightTransform]]:
    """Conversions that make the model's tensors from a checkpoint's.

    Args:
        meta_model: The model, on meta.
        names: Names in the checkpoint.

    Returns:
        The conversions, the checkpoint names that the model does not have, and the transforms that matched, which an
        export reverts.
    """
    known = meta_model.state_dict()
    transforms = get_model_conversion_mapping(meta_model)
    renamings, converters, by_pattern = _sort(transforms)
    conversions: dict[str, Conversion] = {}
    unexpected: list[str] = []
    prefix = meta_model.base_model_prefix
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unexpected.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        conversions.setdefault(target, Conversion(target, converter)).sources.append((pattern or name, name))
    return list(conversions.values()), unexpected, [t for t in transforms if t.was_used()]


def export_conversions(model: PreTrainedModel, names: Iterable[str]) -> list[Conversion]:
    """Conversions that make a checkpoint's tensors from the model's: the reverse of those on load.

    Args:
        model: The model; its class and, if it came from a checkpoint, that checkpoint's transforms are looked up.
        names: Names in the model, a tied tensor once.
    """
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # Built from a config, not from a checkpoint whose names may have a prefix or a legacy form.
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [t for t in transforms if not isinstance(t, PrefixChange)]
    renamings, converters, by_pattern = _sort([t.reverse_transform() for t in reversed(transforms)])

    def rename(name: str) -> str:
        return rename_source_key(name, renamings, [])[0]

    conversions: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, [], converters)
        if pattern is None:
            conversion = Conversion(rename(name), None)
        else:
            conversion = conversions.get(target) or Conversion(target, by_pattern[pattern], rename)
        conversion.sources.append((pattern or name, name))
        conversions[conversion.target] = conversion
    return list(conversions.values())


def _sort(
    transforms: list[WeightTransform],
) -> tuple[list[WeightRenaming], list[WeightConverter], dict[str, WeightConverter]]:
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return renamings, converters, {pattern: c for c in converters for pattern in c.source_patterns}


def tied_groups(model: torch.nn.Module) -> list[list[str]]:
    """All names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
