"""What `resolve` returns: a config without open values, each with the reason for its value. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ds_trainer.config.schema import RunConfig


@dataclass(frozen=True)
class Machine:
    """The part of the machine that a config's derived values depend on.

    Args:
        world: Number of ranks.
        device: Kind of device that every rank has.
        native_dtypes: Formats the device computes natively, fp32 first.
        reason: How `native_dtypes` is known, for people.
    """

    world: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    native_dtypes: tuple[str, ...] = ("fp32",)
    reason: str = ""


@dataclass(frozen=True)
class ResolvedConfig:
    """A run whose every derived value is filled in.

    Args:
        config: The config with no derivable `None` left.
        reasons: Dotted key -> where its value comes from: a file, `--set`, the default, or a derivation and its reason.
        machine: The machine it was resolved for.
        data_ranks: Ranks that see different samples.
        optimizer_implementation: `torch`, `torch_fused` (one kernel), `deepspeed_cpu` (state on the host).
        warnings: What runs as asked, but slowly or without effect.
    """

    config: RunConfig
    machine: Machine
    data_ranks: int
    optimizer_implementation: Literal["torch", "torch_fused", "deepspeed_cpu"]
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
