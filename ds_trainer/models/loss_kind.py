"""What a model's loss is, by what its class is and not by its name."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_trainer.log import warn_once
from ds_trainer.loss import LossKind
from ds_trainer.models.torch_wrappers import unwrapped_model

_CAUSAL_LMS = {
    name
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in ((names,) if isinstance(names, str) else names)
}


def is_causal_lm(model: nn.Module) -> bool:
    """Whether the model predicts each next token, so that logits and labels alone give its loss.

    That is a class which transformers maps to causal language modelling, or one derived from it; a class that a
    checkpoint ships for it; and a decoder of transformers that generates with a head over its vocabulary.
    """
    model = _unwrapped(model)
    if any(_is_of_transformers(each) and each.__name__ in _CAUSAL_LMS for each in type(model).__mro__):
        return True
    if not isinstance(model, PreTrainedModel) or getattr(model.config, "is_encoder_decoder", False):
        return False
    if getattr(type(model), "_auto_class", None) == "AutoModelForCausalLM":
        return True
    return model.can_generate() and model.get_output_embeddings() is not None


def loss_kind(model: nn.Module) -> LossKind:
    """What the model's loss is.

    Args:
        model: This rank's part of a model.
    """
    if is_causal_lm(model):
        return "causal_lm"
    inner: Any = _unwrapped(model)
    if not isinstance(inner, PreTrainedModel) or not _is_of_transformers(_forward_of(inner)):
        return "unknown"
    is_decoder = inner.can_generate() and not getattr(inner.config, "is_encoder_decoder", False)
    return "unknown" if is_decoder else "mean_of_labels"


def say_whose_loss_counts(model: nn.Module) -> None:
    """Warns where a causal language model's own code may compute another loss than the one that is used."""
    owner = _forward_of(_unwrapped(model))
    if not _is_of_transformers(owner):
        warn_once(
            f"{owner.__name__} has a forward of its own: the loss is the cross entropy of next tokens, computed from "
            "the logits that it returns, and no loss that it returns is used; Trainer(compute_loss_func=...) gives "
            "another loss"
        )


def _unwrapped(model: Any) -> Any:
    """The model inside what torch and PEFT put around one."""
    model = unwrapped_model(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _forward_of(model: nn.Module) -> type:
    """The class whose author wrote the model's forward; ours and torch's run that one."""
    passing = ("ds_trainer.", "torch.")
    owners = (
        each for each in type(model).__mro__ if "forward" in vars(each) and not each.__module__.startswith(passing)
    )
    return next(owners, nn.Module)


def _is_of_transformers(cls: type) -> bool:
    return cls.__module__.startswith("transformers.")
