"""What `resolve` returns: a config without open values, each with the reason for its value. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ds_trainer.config.schema import RunConfig
from ds_trainer.planning.pp_costs import StageRanges
from ds_trainer.planning.pp_partition import split_of


@dataclass(frozen=True)
class Machine:
    """The part of the machine that a config's derived values depend on.

    Args:
        world: Number of ranks.
        device: Kind of device that every rank has.
        native_dtypes: Formats the device computes natively, fp32 first.
        reason: How `native_dtypes` is known, for people.
        node_ranks: Ranks on a node; None: not known.
    """

    world: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    native_dtypes: tuple[str, ...] = ("fp32",)
    reason: str = ""
    node_ranks: int | None = None

    def data_parallel_view(self, model_ranks: int) -> Machine:
        """The machine as an engine sees it: of every `model_ranks` ranks, which share a copy of the model, one."""
        return replace(self, world=self.world // model_ranks)


@dataclass(frozen=True)
class ModelSize:
    """What memory and buffers depend on; each None where it is not known.

    Args:
        num_parameters: Elements of a rank's part of the model before an engine shards it; of the largest part, where
            pipeline stages differ.
        largest_parameter: Elements of the largest parameter on a rank.
        hidden_size: Width of the residual stream.
    """

    num_parameters: int | None = None
    largest_parameter: int | None = None
    hidden_size: int | None = None


@dataclass(frozen=True)
class ResolvedConfig:
    """A run whose every derived value is filled in.

    Args:
        config: The config with no derivable `None` left.
        reasons: Dotted key -> where its value comes from: a file, `--set`, the default, or a derivation and its reason.
        machine: The machine it was resolved for.
        dp_size: Ranks that see different samples.
        optimizer_implementation: `torch`, `torch_fused` (one kernel), `deepspeed_cpu` (state on the host).
        size: What one rank's part of the model counts.
        warnings: What runs as asked, but slowly or without effect.
    """

    config: RunConfig
    machine: Machine
    dp_size: int
    optimizer_implementation: Literal["torch", "torch_fused", "deepspeed_cpu"]
    size: ModelSize = ModelSize()
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def stages(self) -> StageRanges | None:
        """The layers of every stage of the pipeline, in order; None: there is none, or the model is not known yet."""
        split = self.config.parallel.pp_split
        return None if split is None else split_of(split)
