"""Tensor-parallel plans: which style shards which module. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ds_trainer.planning.checkpoint_spec import families

STYLE_NAMES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "qkv_colwise",
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "moe_identity_expert",
    "moe_output_bias",
    "all_reduce",
)
"""transformers' styles, of which each does here what it does there, and two of our own: `qkv_colwise`, a column layer
whose output is queries, keys and values side by side, and `moe_output_bias`, which experts add to their output.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/distributed/tensor_parallel.py
"""


@dataclass(frozen=True)
class TensorPlan:
    """Which style each module, or parameter, of a model is sharded by; what no entry matches is not sharded.

    Args:
        styles: Name with every number replaced by `*` -> style, as transformers writes its plans.
        override: Pattern over full names, `*` standing for any part -> style: comes first, an earlier one before a
            later one.
    """

    styles: Mapping[str, str]
    override: Mapping[str, str] = field(default_factory=dict)

    def style_of(self, name: str) -> str | None:
        """The style of a module or parameter; None: no entry matches."""
        entry = self.entry_of(name)
        return self.styles.get(generic(name)) if entry is None else self.override[entry]

    def entry_of(self, name: str) -> str | None:
        """The pattern of `override` that decides a module's or parameter's style; None: none does."""
        return next((pattern for pattern in self.override if fnmatchcase(name, pattern)), None)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Entries that match none of a model's modules and parameters.

        Args:
            names: All of them.
        """
        names = list(names)
        generics = {generic(name) for name in names}
        unused = [pattern for pattern in self.override if not any(fnmatchcase(name, pattern) for name in names)]
        return [entry for entry in self.styles if entry not in generics] + unused


def plan_for(model_type: str, override: Mapping[str, str] | None = None) -> TensorPlan | None:
    """The plan of a model type, as `families.json` has it.

    Args:
        model_type: `model_type` of the model's config.
        override: `parallel.tp_plan`.

    Returns:
        None: there is no plan for the type, and none was given.
    """
    family = families().get(model_type)
    styles = family.tp_plan if family else {}
    return TensorPlan(styles, override or {}) if styles or override else None


def generic(name: str) -> str:
    """A module's or parameter's name with the numbers of layers as `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
