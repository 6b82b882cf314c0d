"""Makes the model of a run from a checkpoint's config or the user's instance, with an embedding row for every token."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError, ModelError
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.compile import compile_blocks
from ds_trainer.models.left_behind import warn_of_left_behind
from ds_trainer.models.new_weights import NewWeights
from ds_trainer.models.pretrained import build_skeleton, prepare_for_training
from ds_trainer.models.resize import resize_embeddings_to_fit
from ds_trainer.models.weight_source import ModuleWeights, WeightSource
from ds_trainer.planning.checkpoint_spec import ModelSpec


def build_model(
    run: RunConfig, instance: nn.Module | None, spec: ModelSpec | None, tokenizer: Any
) -> tuple[Any, WeightSource]:
    """Builds the model of a run without values, or prepares the user's instance.

    Args:
        run: The run's config.
        instance: The user's model; None: the checkpoint's class is built on meta.
        spec: The checkpoint; needed where there is no instance.
        tokenizer: Gives the number of rows that the embedding needs; None: it stays as it is.

    Returns:
        The model and the source of its values.

    Raises:
        UserError: The checkpoint does not fit the config or the tokenizer, or nothing would be trained.
    """
    config = run.model
    weights: WeightSource | None
    if instance is None:
        assert spec is not None
        model: Any = build_skeleton(spec.folder, config, torch.float32)
        new = NewWeights(config.initialize_missing, run.run.seed)
        stored = CheckpointWeights(spec.folder, model, config.allow_pickle, new=new)
        warn_of_left_behind(spec.folder, model, stored.ignored, stored.num_stored)
        weights = stored
    else:
        model, weights = instance, None
        if isinstance(model, PreTrainedModel):
            prepare_for_training(model, config)
        elif config.gradient_checkpointing:
            raise ConfigError(
                f"model.gradient_checkpointing is {json.dumps(config.gradient_checkpointing)} and "
                f"{type(model).__name__} is not a model of transformers",
                "activations are recomputed by the layers of transformers' models",
                "set model.gradient_checkpointing to false and call torch.utils.checkpoint in the model yourself",
            )
        elif run.checkpoint.export:
            raise ConfigError(
                f"checkpoint.export is true and {type(model).__name__} is not a model of transformers",
                "the export is a Hugging Face folder, which only models of transformers have",
                "set checkpoint.export to false and save the model yourself",
            )
    if tokenizer is not None and isinstance(model, PreTrainedModel):
        weights = resize_embeddings_to_fit(model, tokenizer, weights, config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"no parameter of {type(model).__name__} requires a gradient",
            "a run trains at least one parameter",
            "set requires_grad on the parameters to train before Trainer(model=...)",
        )
    if config.compile:
        compile_blocks(model)
    return model, weights or ModuleWeights(model)
