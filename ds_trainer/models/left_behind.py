"""Says which tensors of a checkpoint the model of a run does not have, where transformers drops them silently."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from transformers import PreTrainedModel

from ds_trainer.log import warn_once


def warn_of_left_behind(folder: str, model: PreTrainedModel, names: list[str], num_stored: int) -> None:
    """Warns of parameters that the model's class ignores in a checkpoint, and names the class that has them.

    Buffers that older versions of a class saved are not worth a word: there is a weight among what belongs to a part
    of the model.

    Args:
        folder: The checkpoint.
        model: The model that is trained.
        names: Names in the checkpoint that its class lists as ignored.
        num_stored: Tensors in the checkpoint.
    """
    if not any(name.endswith(".weight") for name in names):
        return
    parts = sorted({".".join(name.split(".")[:2]) for name in names})
    keeps = _auto_class_that_keeps(folder, model)
    warn_once(
        f"{len(names)} of {num_stored} tensors of {folder} are left behind ({', '.join(parts[:5])}): "
        f"{type(model).__name__} does not have them, nor will the export; "
        + (f"model.auto_class {keeps} keeps them" if keeps else "no class of transformers reads them")
    )


def _auto_class_that_keeps(folder: str, model: PreTrainedModel) -> str | None:
    """An auto class that makes the class that the checkpoint was saved from, where that is not the model's own."""
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8-sig"))
    saved_from = next(iter(config.get("architectures") or ()), None)
    if saved_from in (None, type(model).__name__):
        return None
    found = [name for name in dir(transformers) if name.startswith("AutoModelFor")]
    making = [name for name in found if saved_from in _classes(name, config.get("model_type"))]
    # The general ones come last.
    return min(
        making, key=lambda name: (name in ("AutoModelForPreTraining", "AutoModelForMultimodalLM"), name), default=None
    )


def _classes(auto_class: str, model_type: str | None) -> tuple[str, ...]:
    """Names of the classes that an auto class makes of a model type."""
    made = getattr(transformers, auto_class)._model_mapping._model_mapping.get(model_type, ())
    return (made,) if isinstance(made, str) else tuple(made)
