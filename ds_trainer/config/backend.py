"""What runs the step: the engine itself, or what accelerate runs on. Pure."""

from __future__ import annotations

from ds_trainer.config.schema import RunConfig


def backend(config: RunConfig) -> str:
    """`deepspeed`, `fsdp2`, `ddp`, or the name of a plug-in."""
    return config.accelerate.backend if config.parallel.engine == "accelerate" else config.parallel.engine


def engine_column(config: RunConfig) -> str:
    """The engine's name in the table of `ds_trainer.config.key_support`: accelerate's with what it runs on."""
    engine = config.parallel.engine
    return f"accelerate+{config.accelerate.backend}" if engine == "accelerate" else engine
