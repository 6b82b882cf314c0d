"""Checks of a checkpoint's config.json and headers against `model.auto_class`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.planning.checkpoint_spec import ModelSpec, families

CAUSAL = "AutoModelForCausalLM"
_OTHER_HEAD = re.compile(r"For\w*(Classification|QuestionAnswering)$")


def names_are_the_models(config: RunConfig, spec: ModelSpec) -> bool:
    """Whether the model's parameters are known to have the checkpoint's names, but for a prefix and a tied head."""
    family = families().get(spec.model_type)
    is_known = family is not None and family is spec.family and family.conversion is None
    return is_known and not spec.pickled and config.model.auto_class == CAUSAL and not config.model.trust_remote_code


def check_class(config: RunConfig, spec: ModelSpec) -> Iterator[ConfigError]:
    """A class that transformers does not have for the model type, or whose head the checkpoint lacks."""
    if config.model.auto_class != CAUSAL or config.model.trust_remote_code:
        return
    if spec.model_type not in families() and spec.config.get("is_encoder_decoder"):
        yield ConfigError(
            f"model.auto_class is {CAUSAL}, and config.json of {spec.folder} is of an encoder and a decoder "
            f"({spec.model_type})",
            "transformers has no such class for that model type",
            "set model.auto_class to AutoModelForSeq2SeqLM, or model.path to a decoder alone",
        )
    elif _has_other_head(config, spec) and names_are_the_models(config, spec) and not spec.tied:
        vocabularies = [name for name, tensor in spec.tensors.items() if tensor.shape[:1] == (spec.vocab_size,)]
        if len(vocabularies) < 2:
            yield ConfigError(
                f"config.json of {spec.folder} says {', '.join(spec.architectures)}, and its weights have no head over "
                f"the vocabulary, which {CAUSAL} needs",
                "every parameter that is not tied to another is read from the checkpoint, none is initialised",
                "set model.path to a language model, or model.auto_class to the class it was saved from",
            )


def class_warnings(config: RunConfig, spec: ModelSpec) -> Iterator[str]:
    """A class with another head than the checkpoint's."""
    if _has_other_head(config, spec):
        yield (
            f"config.json says {', '.join(spec.architectures)}, and model.auto_class {CAUSAL} builds a language "
            "model: the checkpoint's own head is left out"
        )


def _has_other_head(config: RunConfig, spec: ModelSpec) -> bool:
    return config.model.auto_class == CAUSAL and any(map(_OTHER_HEAD.search, spec.architectures))
