"""Parameters that a checkpoint lacks and a run begins anew, such as the head of another task.

Their values depend on the run's seed and on their names alone, so they are the same on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b

import torch
from transformers import PreTrainedModel

from ds_trainer.errors import ModelError


@dataclass(frozen=True)
class NewWeights:
    """Which parameters may be initialised, and from what.

    Args:
        patterns: Of their names, as in the shell; None: those of a task head.
        seed: Of their values.
    """

    patterns: Sequence[str] | None
    seed: int

    def among(self, names: Iterable[str], model: PreTrainedModel) -> list[str]:
        """Those of some parameters that may be initialised."""
        if self.patterns is not None:
            return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)]
        if model.base_model is model or model.get_output_embeddings() is not None:
            return []  # The head over a vocabulary is a part of a language model.
        return [name for name in names if not name.startswith(f"{model.base_model_prefix}.")]

    def values(self, names: Iterable[str], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Initial values, as the model's class draws them.

        Args:
            names: Parameters.
            model: The model on meta.

        Raises:
            ModelError: The class does not say how one is initialised.
        """
        return {name: self._value(name, model) for name in names}

    def _value(self, name: str, model: PreTrainedModel) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        module = deepcopy(model.get_submodule(owner)).to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(torch.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()))
            model._init_weights(module)
        value = module.get_parameter(leaf).detach()
        if value.isnan().any():
            raise ModelError(
                f"{type(model).__name__} does not say how {name} is initialised",
                "a parameter that the checkpoint lacks has the values that its class draws",
                "remove it from model.initialize_missing, and set model.path to a checkpoint that has it",
            )
        return value
