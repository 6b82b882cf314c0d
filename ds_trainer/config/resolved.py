"""The result of `resolve`: a config without open values, with the reason of each value. Pure."""

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
        native_dtypes: Dtypes that the device computes natively, fp32 first.
        reason: How `native_dtypes` is known, as text.
        node_ranks: Ranks on a node; None: not known.
    """

    world: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    native_dtypes: tuple[str, ...] = ("fp32",)
    reason: str = ""
    node_ranks: int | None = None

    def data_parallel_view(self, model_ranks: int) -> Machine:
        """The machine with one of every `model_ranks` ranks, which hold one model replica: the data-parallel ranks."""
        return replace(self, world=self.world // model_ranks)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model on one rank, which memory and buffers depend on; each None where it is not known.

    Args:
        num_parameters: Elements of the model on a rank, after tensor and pipeline parallelism and before an engine
            shards them; those of the largest rank, where pipeline stages differ.
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
        dp_size: Data-parallel ranks, which see different samples.
        optimizer_implementation: `torch`, `torch_fused` (one kernel), `deepspeed_cpu` (state on the host).
        size: The size of the model on one rank.
        warnings: Settings that are slow or without effect.
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
