"""What engines on torch's own optimizers and loss scaler have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import nn

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import EngineFacts, OptimizerFactory, StepOutcome
from ds_trainer.engines.clip import clip_by_norm, global_norm, norm_over_group
from ds_trainer.engines.introspect import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    content_hash,
    devices,
    grouped_parameters,
    local_shard,
    measured_pp_size,
    measured_tp_size,
    state_tensors,
    stateless_bytes,
    storage_bytes,
)
from ds_trainer.engines.state_handles import MASTER, State, entry, live
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.load_weights import load_full
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.torch_internals import mark_overflow


class TorchEngine:
    """An engine on a torch optimizer: the whole protocol but for when and how gradients are reduced.

    As it stands every data-parallel rank holds all parameters in fp32, or those that tensor parallelism and the
    pipeline leave to this rank. Below fp32 the forward runs under autocast, and fp16 has a dynamic loss scale.
    An engine that shards parameters overrides `load`, `owned_range`, `first_row`, `gathered`, `norm_over_ranks`,
    `parameter_hash` and `group_size`.

    `backward` starts from this rank's share of the step's loss, so that gradients are to be summed over the
    data-parallel ranks. An engine that averages them overrides `scale_loss`.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    supports_pipeline: ClassVar[bool] = False

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        self._resolved, self.config, self.mesh = resolved, resolved.config, mesh
        self.module: Any  # its attributes are those of the wrapper
        self._compute_dtype = TORCH_DTYPES[self.config.precision.dtype or "fp32"]
        scale = self.config.precision.loss_scale
        self._scaler = torch.amp.GradScaler(
            mesh.device.type,
            enabled=self._compute_dtype == torch.float16,
            init_scale=2.0**scale.initial_scale_power,
            growth_interval=scale.loss_scale_window,
        )

    def load(self, model: nn.Module, weights: WeightSource, split: ModelSplit) -> None:
        """Fills every parameter, in fp32."""
        load_full(model, weights, self.mesh.device, torch.float32)
        self.module, self._split = model, split
        self._parameters: dict[str, Any] = dict(model.named_parameters())

    def wrap(self, make_optimizer: OptimizerFactory) -> None:
        """Builds the optimizer on what this rank trains."""
        self._optimizer = make_optimizer(self._trained())

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context around one forward and backward, which reduces gradients in the last one; each engine has its own."""
        raise NotImplementedError

    def forward(self, **inputs: Any) -> Any:
        """Calls the model under `autocast`."""
        with self.autocast():
            return self.module(**inputs)

    def autocast(self) -> AbstractContextManager[None]:
        """Torch's autocast below fp32."""
        lower = self._compute_dtype != torch.float32
        return torch.autocast(self.mesh.device.type, self._compute_dtype, enabled=lower)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale of fp16: gradients are summed over the ranks, so shares add up as they are."""
        return self._scaler.scale(loss)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates gradients, scaled by the loss scale, in `parameter.grad`."""
        self.scale_loss(loss).backward()

    def pipeline(self) -> AbstractContextManager[None]:
        """Not supported, unless a derived engine says so in `supports_pipeline`."""
        raise NotImplementedError

    def start_pipeline(self) -> None:
        """Makes the scaler's scale before the passes: only the last stage has a loss to multiply by it."""
        self._scaler.scale(torch.zeros((), device=self.mesh.device))

    def sum_tied_gradients(self) -> None:
        """Moves the gradients of tied parameters' replicas to their owners, after all passes of a pipeline.

        Comm: each replica sends its gradient, or its shard of it, to the owner's stage.
        """
        gradients = {name: p.grad if p.grad is None else local_shard(p.grad) for name, p in self._parameters.items()}
        self._split.sum_tied(gradients)
        for name, parameter in self._parameters.items():
            if not self._split.owns(name):
                parameter.grad = None

    def optimizer_step(self) -> StepOutcome:
        """Clips by the norm over all ranks and updates; a gradient that is not finite is dropped."""
        gradients: list[torch.Tensor] = []
        counted: list[torch.Tensor] = []
        self._scaler.unscale_(self._optimizer)
        for name, parameter in self._trained():
            if parameter.grad is not None:
                gradients.append(local_shard(parameter.grad))
                counted += self._split.counted(name, gradients[-1], self.first_row(parameter))
        norm = self.norm_over_ranks(global_norm(counted, self.config.optimizer.norm_type)).item()
        finite = isfinite(norm)
        if finite:
            clip_by_norm(gradients, self.config.optimizer.max_grad_norm, norm)
            self._scaler.step(self._optimizer)
        elif self._scaler.is_enabled():
            # Another rank's gradient may be the one that is not finite: the loss scale has to fall on all alike.
            mark_overflow(self._scaler, self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._split.refresh_tied(self._local_shards())
        return StepOutcome(norm if finite else float("inf"), skipped=not finite)

    def norm_over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of the full gradient, on every rank.

        Args:
            norm: The norm of what counts on this rank: what several tensor-parallel ranks hold counts on one of them.

        Comm: one all-reduce of 8 bytes over the ranks of one replica of the model.
        """
        return norm_over_group(norm, self.config.optimizer.norm_type, self.mesh.model_host_group)

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self._optimizer.param_groups

    def owned_range(self, parameter: Any) -> tuple[int, int] | None:
        """Start and stop of what this rank owns in the row-major flattened parameter; None: nothing of it."""
        return 0, parameter.numel()

    def first_row(self, parameter: Any) -> int:
        """Number of the first row that this rank owns of a parameter."""
        return 0

    def gathered(self, tensor: Any) -> torch.Tensor:
        """A parameter, or its gradient, in full on the host; where it is sharded, a collective."""
        return tensor.detach().cpu()

    def parameter_layout(self) -> list[ParameterSlice]:
        """What `owned_range` says of each parameter that is trained."""
        return [self._split.slice(name, tuple(p.shape), owned) for name, p, owned in self._owned_ranges()]

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """fp32 masters, one at a time.

        Comm: that of `gathered`, then one all-gather over the tensor-parallel ranks of each tensor that they share.
        """
        return self._split.merged((name, self.gathered(p)) for name, p in self._owned())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reduced gradients, one at a time and freed of the loss scale.

        Comm: as `full_parameters`.
        """
        scale, reduced = self._scaler.get_scale(), ((name, p.grad) for name, p in self._owned())
        return self._split.merged((n, self.gathered(grad).float() / scale) for n, grad in reduced if grad is not None)

    def state(self) -> State:
        """Masters and optimizer states of what this rank owns."""
        states, handles = self._optimizer.state, {}
        for name, parameter, (start, stop) in self._owned_ranges():
            values = states.get(parameter, {})
            entries = {key: entry(values, key, stop - start) for key in values}
            handles[name] = {MASTER: live(parameter, stop - start)} | entries
        return handles

    def scalar_state(self) -> dict[str, Any]:
        """The loss scale."""
        return {"loss_scale": self._scaler.state_dict()}

    def load_scalar_state(self, values: Mapping[str, Any]) -> None:
        """Sets it."""
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(values["loss_scale"]))

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Nothing belongs to one rank alone."""
        return {}

    def load_rank_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing belongs to one rank alone."""

    def parameter_hash(self) -> str | None:
        """Hash of all parameters: every data-parallel rank holds those of its tensor-parallel rank and its stages."""
        return content_hash(self._parameters.values())

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """What this rank holds of them: all, or its shard."""
        return self._split.shared(self._local_shards())

    def group_size(self) -> int:
        """Ranks over which gradients are reduced."""
        return self.mesh.dp_group.size()

    def facts(self) -> EngineFacts:
        """Measures the parameters and the optimizer."""
        parameters = list(self._parameters.values())
        return EngineFacts(
            engine=type(self).__name__,
            optimizer=type(self._optimizer).__name__,
            stage=None,
            group_size=self.group_size(),
            param_device=devices(parameters),
            optimizer_device=devices(grouped_parameters(self._optimizer)),
            param_bytes=storage_bytes(parameters),
            optimizer_bytes=storage_bytes(state_tensors(self._optimizer)),
            nvme_bytes=0,
            compute_dtype=DTYPE_NAMES[self._compute_dtype],
            settings={
                "parallel.tp": measured_tp_size(self._split, self._parameters.items()),
                "parallel.pp": measured_pp_size(self._split, self._parameters),
            },
            stateless_bytes=stateless_bytes(self._optimizer, grouped_parameters(self._optimizer)),
        )

    def close(self) -> None:
        """Nothing is held outside Python's memory."""

    def _owned(self) -> list[tuple[str, Any]]:
        """All but replicas of what another pipeline stage owns."""
        return [(name, p) for name, p in self._parameters.items() if self._split.owns(name)]

    def _trained(self) -> list[tuple[str, Any]]:
        """What this rank's optimizer updates."""
        return [(name, p) for name, p in self._owned() if p.requires_grad]

    def _owned_ranges(self) -> Iterator[tuple[str, Any, tuple[int, int]]]:
        for name, parameter in self._trained():
            owned = self.owned_range(parameter)
            if owned is not None:
                yield name, parameter, owned

    def _local_shards(self) -> dict[str, torch.Tensor]:
        return {name: local_shard(p) for name, p in self._parameters.items()}
