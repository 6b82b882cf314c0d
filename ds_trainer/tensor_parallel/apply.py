"""Splits a Hugging Face model over the tensor group: swaps its layers for parallel ones, as its plan says."""

from __future__ import annotations

from torch import nn

from ds_trainer.config.schema import ParallelConfig
from ds_trainer.mesh.mesh import Mesh
from ds_trainer.tensor_parallel.split import ModelSplit


def split_model(model: nn.Module, config: ParallelConfig, mesh: Mesh) -> ModelSplit:
    """Splits a model in place; without tensor parallelism it stays as it is.

    Args:
        model: A skeleton on meta, or an instance; a parameter that is cut is afterwards a new one, on meta, of its
            local shape.
        config: The config's parallel section.
        mesh: Process groups.

    Returns:
        How each parameter was cut.

    Raises:
        ModelError: There is no plan for the model, an entry of it matches nothing, or a size does not divide.
    """
    if config.tp == 1:
        return ModelSplit()
    raise NotImplementedError
