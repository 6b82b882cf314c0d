"""The engine protocol and the registry that finds engines by name.

An engine owns everything about one step that differs between DeepSpeed, DDP and others: where parameters live, how
gradients are reduced, clipped and applied. An executor (`ds_trainer.executors`) drives it micro-batch by micro-batch.
Engines are plug-ins: the registry is the entry-point group `ds_trainer.engines`, which the built-in ones use too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.state_handles import State
from ds_trainer.errors import ConfigError, EngineError
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepOutcome:
    """What the end of a step did.

    Args:
        grad_norm: Global L2 norm of the step's gradient before clipping; inf when not finite.
        skipped: True when no weight was updated, because the gradient was not finite.
    """

    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class EngineFacts:
    """What really exists after set-up, measured on live objects.

    Args:
        engine: Class of the object that runs the step.
        optimizer: Class of the optimizer that updates the weights.
        stage: ZeRO stage; None outside DeepSpeed.
        group_size: Ranks over which gradients are reduced.
        param_device: `cpu`, `cuda:0`, `nvme`, `meta`.
        optimizer_device: Where masters and moments live or will live: `cpu`, `cuda:0`, `nvme`.
        param_bytes: Bytes of the model's parameters on this rank.
        optimizer_bytes: Bytes of masters and optimizer states on this rank, as far as they exist yet.
        nvme_bytes: Bytes in this rank's swap files.
        compute_dtype: Dtype of the parameters in the forward pass.
        settings: What else was set up, by the config's dotted keys; compared with their values after set-up.
        stateless_bytes: Bytes of what this rank's optimizer updates and has no states of yet: step 1 makes them.
    """

    engine: str
    optimizer: str
    stage: int | None
    group_size: int
    param_device: str
    optimizer_device: str
    param_bytes: int
    optimizer_bytes: int
    nvme_bytes: int
    compute_dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    stateless_bytes: int = 0


@runtime_checkable
class Engine(Protocol):
    """One training step's backend.

    Order of calls: `load` and `wrap`; then in each step `forward` and `backward` inside `microbatch`, and
    `optimizer_step`. In a step that a pipeline runs: `forward` inside `pipeline`, and `optimizer_step`.
    """

    supports_pipeline: ClassVar[bool]
    """Whether `pipeline` reduces gradients after all passes of a pipeline. If not, parallel.pp above 1 is refused."""

    module: nn.Module
    """The wrapped model, for `train()` and `eval()`."""

    def load(self, model: nn.Module, weights: WeightSource, split: ModelSplit) -> None:
        """Puts the values of `weights` where this engine wants `model`'s parameters.

        Args:
            model: Holds what this tensor-parallel rank holds: a parameter that `split` names has its local shape.
            weights: Local values under the model's names.
            split: Which slices of the full parameters they are, and how to merge them.
        """

    def wrap(self, make_optimizer: OptimizerFactory) -> None:
        """Builds the optimizer on the placed parameters and the object that runs the step."""

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context around one forward and backward; only the last one of a step may reduce gradients."""

    def forward(self, **inputs: Any) -> Any:
        """The model's outputs, computed in the run's dtype; under ZeRO-3 every rank must call it."""

    def autocast(self) -> AbstractContextManager[None]:
        """The run's dtype for the model's own methods, such as `generate`, which call the model without `forward`.

        Parameters that are gathered for them are freed at its end.
        """

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that a backward pass begins with, so that gradients add up to those of the step's loss.

        It undoes the mean over data-parallel ranks, where the engine averages, and is times the loss scale of fp16.

        Args:
            loss: This rank's share of the step's loss: shares add up over ranks and micro-batches.
        """

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of `loss`, this rank's share of the step's: shares add up over ranks and calls."""

    def pipeline(self) -> AbstractContextManager[None]:
        """Context around all passes of one step that a pipeline runs, several of them in flight at a time.

        Inside, `forward` is called for each stage and micro-batch, and the pipeline runs the backward passes itself,
        from the scaled loss on: they accumulate gradients of this rank's samples, in the run's dtype for gradients. At
        its end these are reduced over the data-parallel ranks once, and summed over the stages that share a tied
        parameter. `optimizer_step` then updates what this rank owns, and gives replicas of tied parameters their
        owners' new values.
        """

    def optimizer_step(self) -> StepOutcome:
        """Reduces, clips, updates and zeroes the gradients, unless the gradient is not finite."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The live optimizer's parameter groups, whose `lr` the trainer sets before `optimizer_step`."""

    def parameter_layout(self) -> list[ParameterSlice]:
        """Which slice of each full parameter this rank's optimizer owns."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter (a tied one once) in full on the host; a collective of all ranks, one tensor at a time."""

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every reduced gradient in full, fp32, on the host; a collective of all ranks, before `optimizer_step`."""

    def state(self) -> State:
        """fp32 masters and optimizer states by parameter name, of the slices in `parameter_layout`.

        Optimizer states exist from the first `optimizer_step` on.
        """

    def scalar_state(self) -> dict[str, Any]:
        """Numbers that the next step depends on, such as the loss scale; JSON."""

    def load_scalar_state(self, values: Mapping[str, Any]) -> None:
        """Sets what `scalar_state` returned; called after the state has been written."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Tensors that belong to this rank alone, such as the error that a lossy compression of gradients left."""

    def load_rank_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets what `rank_state` returned."""

    def parameter_hash(self) -> str | None:
        """Hash of the parameters this rank starts with; None where they are sharded, and each exists once."""

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """What this rank holds of each parameter that other pipeline stages have too, as its forward pass uses it."""

    def facts(self) -> EngineFacts:
        """Measures what exists."""

    def close(self) -> None:
        """Releases files, threads and buffers."""


def engine_names() -> list[str]:
    """Names of every installed engine."""
    return sorted(point.name for point in entry_points(group="ds_trainer.engines"))


def make_engine(resolved: ResolvedConfig, mesh: Mesh) -> Engine:
    """The engine that the config names.

    Raises:
        ConfigError: No installed engine has that name.
        EngineError: The run has a pipeline, and the engine declares no support for one.
    """
    name = resolved.config.parallel.engine
    for point in entry_points(group="ds_trainer.engines"):
        if point.name == name:
            engine = point.load()(resolved, mesh)
            _check_pipeline(engine, mesh)
            return engine
    raise ConfigError(
        f"parallel.engine is {name!r}",
        f"it names an engine installed under the entry-point group ds_trainer.engines: {', '.join(engine_names())}",
        "set parallel.engine to one of these, or install the plug-in that provides it",
    )


def _check_pipeline(engine: Engine, mesh: Mesh) -> None:
    if mesh.grid.pp_size > 1 and not getattr(engine, "supports_pipeline", False):
        raise EngineError(
            f"parallel.pp is {mesh.grid.pp_size} and {type(engine).__name__} does not declare supports_pipeline",
            "only the engine itself can reduce its gradients after all passes of a pipeline",
            "set parallel.engine to deepspeed, fsdp2 or ddp, or parallel.pp to 1",
        )
