"""Writes `families.json` from the installed transformers: `python -m ds_trainer.parallel.make_families`."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_trainer.errors import ModelError
from ds_trainer.models.extra_tp_plans import EXTRA_TP_PLANS
from ds_trainer.models.small_configs import causal_lm_classes, small_configs
from ds_trainer.parallel.pipeline.split import verified_trace
from ds_trainer.planning.checkpoint_spec import CONFIG_KEYS

TARGET = Path(str(files("ds_trainer.planning"))) / "families.json"


def make_families() -> dict[str, dict[str, Any]]:
    """Model type -> the fields of `ds_trainer.planning.checkpoint_spec.Family`, for the whole causal-LM mapping."""
    return {name: family(name) | stages(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}


def family(model_type: str) -> dict[str, Any]:
    """The fields that follow from classes and configs."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    config_class = CONFIG_MAPPING[model_type]
    names = {model_type, *((class_name,) if isinstance(class_name, str) else class_name)}
    names |= {sub.model_type for sub in config_class.sub_configs.values() if hasattr(sub, "model_type")}
    conversions = [c for name in names for c in get_checkpoint_conversion_mapping(name) or []]
    kinds = {"merge" if isinstance(c, WeightConverter) else "rename" for c in conversions}
    return {
        "aliases": {k: v for k, v in config_class.attribute_map.items() if k in CONFIG_KEYS},
        "tied": bool(getattr(config_class, "tie_word_embeddings", False)),
        "conversion": min(kinds, default=None),
        "tp_plan": _tp_plan(model_type) | EXTRA_TP_PLANS.get(model_type, {}),
    }


def stages(model_type: str) -> dict[str, Any]:
    """The fields of pipeline parallelism, traced on scaled-down models.

    transformers has plans of half of the types, and these leave some modules out.
    """
    classes: tuple[Any, Any] = causal_lm_classes(model_type)
    try:
        plan = verified_trace(*classes).plan
    except ModelError as error:
        return {"pp_plan": None, "pp_refused": " ".join(error.found.split())}
    return {"pp_plan": {"layers": plan.layers, "first": list(plan.first), "last": list(plan.last)}, "pp_refused": None}


def _tp_plan(model_type: str) -> dict[str, str]:
    """The plan that an instance of the type's class has, which puts names of inner models and of the head together."""
    cls, config_class = causal_lm_classes(model_type)
    parts = (config_class, *config_class.sub_configs.values())
    if not any(getattr(part, "base_model_tp_plan", None) for part in parts):
        return {}
    plan: dict[str, str] = {}
    for config in small_configs(config_class):
        try:
            with torch.device("meta"):
                plan |= cls(config).tp_plan
        except ImportError:  # Some vision towers need libraries that may not be installed.
            return {}
    # A model without a separate body has its names twice, once without their prefix.
    return {name: style for name, style in plan.items() if not any(other.endswith(f".{name}") for other in plan)}


def as_text(table: dict[str, dict[str, Any]]) -> str:
    """The table as it ships, each list on one line."""
    text = json.dumps(table, indent=1, sort_keys=True)
    return re.sub(r"\[[^][{}]*]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


if __name__ == "__main__":
    TARGET.write_text(as_text(make_families()))
