"""The longest sequence that a model takes, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Positions of a model; None where there is no limit.

    Scaled rotary embeddings reach `factor` times the positions that the model was trained on first. Recipes such as
    Qwen's for YaRN leave `max_position_embeddings` at the latter.

    Args:
        config: The language model's part of config.json.
    """
    stated = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(stated, int) or not isinstance(rope, dict):
        return stated
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or stated
    factor = rope.get("factor")
    return max(stated, int(original * factor)) if isinstance(factor, int | float) else stated
