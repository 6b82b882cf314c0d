"""Whether the installed DeepSpeed accepts a config."""

from __future__ import annotations

from deepspeed.runtime.config import DeepSpeedConfig


def accept(native: dict, world: int) -> DeepSpeedConfig:
    """DeepSpeed's own reading of a native config for a number of ranks; raises where it refuses."""
    return type("ForRanks", (DeepSpeedConfig,), {"world_size": property(lambda self: world, lambda self, value: None)})(
        native
    )
