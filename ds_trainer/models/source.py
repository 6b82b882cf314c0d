"""The model of a run before it is built: its sizes and dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ConfigError
from ds_trainer.health.expected_wait import expected_wait
from ds_trainer.models.hub import resolve_folder
from ds_trainer.planning.checkpoint_spec import ModelSpec, read_spec
from ds_trainer.planning.positions import position_limit

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, of which only the headers are read, or an instance of the user's.

    Args:
        spec: The checkpoint; None: there is an instance.
        instance: The instance; None: there is a checkpoint.
    """

    spec: ModelSpec | None
    instance: Any

    def sizes(self) -> tuple[int | None, int | None]:
        """Elements of the full model and of its largest parameter; None where the headers do not say."""
        if self.spec is not None:
            return self.spec.num_parameters or None, self.spec.largest_parameter or None
        counts = [parameter.numel() for parameter in self.instance.parameters()]
        return sum(counts), max(counts)

    def vocab_size(self) -> int | None:
        """Rows of the embedding; None where the instance does not say which module it is."""
        if self.spec is not None:
            return self.spec.vocab_size
        if hasattr(self.instance, "get_input_embeddings"):
            return self.instance.get_input_embeddings().weight.shape[0]
        return None

    def max_positions(self) -> int | None:
        """Longest sequence that the model takes; None where there is no limit."""
        if self.spec is not None:
            return self.spec.max_positions
        config = getattr(self.instance, "config", None)
        if isinstance(config, PreTrainedConfig):
            return position_limit(config.get_text_config().to_dict())
        return getattr(config, "max_position_embeddings", None)

    def dtype(self) -> torch.dtype:
        """Dtype of the instance's first parameter, or of most tensors of the checkpoint; else fp32."""
        if self.spec is None:
            return next(self.instance.parameters()).dtype
        counts = Counter(tensor.dtype for tensor in self.spec.tensors.values())
        return _TORCH_DTYPES.get(counts.most_common(1)[0][0], torch.float32) if counts else torch.float32


def find_model(config: ModelConfig, instance: nn.Module | None) -> ModelSource:
    """The instance, or the checkpoint that the config names, downloaded if it is not here.

    Raises:
        ConfigError: There is neither.
        ModelError: The checkpoint is not found, or not readable.
    """
    if instance is not None:
        return ModelSource(None, instance)
    if config.path is None:
        raise ConfigError(
            "model.path is not set and no model was passed to Trainer",
            "a run trains one checkpoint",
            "set model.path to a checkpoint's folder or hub id, or pass Trainer(model=...)",
        )
    with expected_wait():  # A download may stall.
        folder = resolve_folder(config.path, config.revision, config.allow_pickle)
    return ModelSource(read_spec(folder), None)
