"""The blocks of a transformer: the modules that it repeats and that act as one."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers says are not to be split; none where the model does not say, or is not its own."""
    names = set(getattr(model, "_no_split_modules", None) or ()) if isinstance(model, PreTrainedModel) else set()
    return [module for module in model.modules() if type(module).__name__ in names]
