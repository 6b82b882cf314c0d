"""PyTorch FSDP2: fp32 masters, gradients and optimizer states cut by rows over the data ranks.

Of a model that tensor parallelism has split, each tensor rank's part is cut by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.torch.arguments import FSDP2Arguments, fsdp2_arguments
from ds_trainer.distributed.device_mesh import device_mesh
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import EngineFacts, OptimizerFactory, StepOutcome
from ds_trainer.engines.clip import norm_over_group
from ds_trainer.engines.clipped_step import clipped_step
from ds_trainer.engines.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ds_trainer.engines.fsdp2.load import first_row, load_sharded, shard_range
from ds_trainer.engines.fsdp2.wrap import ends, groups
from ds_trainer.engines.introspect import (
    content_hash,
    devices,
    grouped_parameters,
    local_part,
    pipeline_ranks,
    state_tensors,
    storage_bytes,
    tensor_ranks,
)
from ds_trainer.engines.state_handles import MASTER, State, entry, live
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.load_weights import fill_buffers
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit


class FSDP2Engine:
    """The `fsdp2` engine.

    Below fp32 gathered parameters are cast, so that masters stay fp32; fp16 adds a dynamic loss scale.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    supports_pipeline: ClassVar[bool] = True

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        self._resolved, self.config, self.mesh = resolved, resolved.config, mesh
        self.module: Any  # its attributes are those of FSDPModule
        self._arguments = fsdp2_arguments(resolved)
        scale = self.config.precision.loss_scale
        self._scaler = torch.amp.GradScaler(
            mesh.device.type,
            enabled=self.config.precision.dtype == "fp16",
            init_scale=2.0**scale.initial_scale_power,
            growth_interval=scale.loss_scale_window,
        )
        self._accumulates_wide = False

    def load(self, model: nn.Module, weights: WeightSource, split: ModelSplit) -> None:
        """Cuts the model; each rank reads and keeps its own rows only."""
        self._split = split
        fill_buffers(model, weights, self.mesh.device)
        if self._arguments.buffer_dtype is not None:
            _cast_buffers(model, TORCH_DTYPES[self._arguments.buffer_dtype])
        device = torch.device("cpu") if self._arguments.cpu_offload else self.mesh.device
        self._parameters: dict[str, Any] = load_sharded(model, weights, lambda: self._cut(model), device)
        self.module = model

    def _cut(self, model: nn.Module) -> None:
        arguments, reshard = self._arguments, self._arguments.reshard_after_forward
        modules = groups(model, self.config.fsdp)
        shared: dict[str, Any] = {
            "mesh": device_mesh(self.mesh, arguments.mesh),
            "mp_policy": mixed_precision_policy(arguments),
            "offload_policy": offload_policy(arguments),
        }
        embeddings, head = ends(model)
        for module in reversed(modules):
            # The backward pass begins with the head, which would be gathered again at once.
            part: Any = fully_shard(module, reshard_after_forward=False if module is head else reshard, **shared)
            if module is embeddings and isinstance(module, nn.Embedding):
                part.set_unshard_in_backward(False)  # Its backward pass looks at the indices only.
        # The backward pass begins with what the model itself gathers, which would be gathered again at once.
        fully_shard(model, reshard_after_forward=False if modules else reshard, **shared)
        sum_over_ranks(model)
        if depth := self.config.fsdp.prefetch_depth:
            _prefetch(modules, depth)

    def wrap(self, make_optimizer: OptimizerFactory) -> None:
        """Builds the optimizer on the sharded parameters."""
        self._optimizer = make_optimizer(self._trained())

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Reduces gradients in the last micro-batch only."""
        self.module.set_requires_gradient_sync(is_last)
        yield

    def forward(self, **inputs: Any) -> Any:
        """Calls the model, whose modules gather their parameters; without gradients they are freed at its end."""
        if torch.is_grad_enabled():
            return self.module(**inputs)
        with self.autocast():
            return self.module(**inputs)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Gathered parameters have the format already; they are freed at the end, as a backward pass would."""
        try:
            yield
        finally:
            for module in fsdp_modules(self.module):
                module.reshard()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients are summed over the ranks, so that shares add up as they are."""
        return self._scaler.scale(loss)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates in the format in which gradients are reduced; FSDP2's hooks reduce."""
        self.scale_loss(loss).backward()

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Keeps gradients whole over all passes and cuts them at its end; so it does parameters, unless told otherwise.

        Comm: at its end one reduce-scatter of each group's gradients over the data ranks of a copy of the model, one
            all-reduce over the copies; then copies of tied parameters send their shards of it to their owners.
        """
        # Makes the scaler's scale: only the last stage has a loss to multiply by it.
        self._scaler.scale(torch.zeros((), device=self.mesh.device))
        root = self.module
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(self._arguments.reshard_after_forward is not False)
        self._accumulate_wide()
        yield
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        # What FSDP2 does at the end of a backward pass, of the groups that this pass has left out; no public method
        # does it, and torch's own pipeline calls it too.
        root._get_fsdp_state()._root_post_backward_final_callback()
        reduced = {name: p.grad if p.grad is None else local_part(p.grad) for name, p in self._parameters.items()}
        self._split.sum_tied(reduced)
        for name, parameter in self._parameters.items():
            if not self._split.owns(name):
                parameter.grad = None

    def _accumulate_wide(self) -> None:
        """Adds each gradient to a sum in the format of the reduction as soon as it is there.

        FSDP2 does so at the end of a backward pass through a group, which a pass that computes the gradients of weights
        alone is not: of several such in a row the gradients would be added in the parameters' format.
        """
        if self._accumulates_wide or self._arguments.param_dtype in (None, self._arguments.reduce_dtype):
            return
        self._accumulates_wide = True
        for module in fsdp_modules(self.module):
            module.unshard()  # Makes the whole parameters, which stay the same objects from then on.
            group: Any = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group else ():
                if parameter.unsharded_param.requires_grad:
                    parameter.unsharded_param.register_post_accumulate_grad_hook(partial(_widen, parameter))

    def optimizer_step(self) -> StepOutcome:
        """Clips by the norm over all shards and updates; a gradient that is not finite is dropped."""
        gradients: list[torch.Tensor] = []
        counted: list[torch.Tensor] = []
        for name, parameter in self._trained():
            if parameter.grad is not None:
                gradients.append(local_part(parameter.grad))
                counted += self._split.counted(name, gradients[-1], first_row(parameter))
        config, over_ranks = self.config.optimizer, self._over_ranks
        outcome = clipped_step(self._optimizer, self._scaler, gradients, counted, config, over_ranks)
        self._split.refresh_tied(self._shards())
        return outcome

    def _over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        copies = self.config.parallel.dp_replicate
        return norm_over_group(norm, self.config.optimizer.norm_type, self.mesh.host_group, copies)

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self._optimizer.param_groups

    def parameter_layout(self) -> list[ParameterSlice]:
        """The rows of each parameter that this rank owns; none where there are fewer rows than ranks."""
        return [
            self._split.slice(name, tuple(p.shape), shard_range(p))
            for name, p in self._trained()
            if local_part(p).numel()
        ]

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """fp32 masters, gathered one at a time.

        Comm: one all-gather of each tensor over the data ranks of a copy, one more over the tensor ranks if it is cut.
        """
        return self._split.merged((name, self._gathered(p)) for name, p in self._owned())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reduced gradients, gathered one at a time and freed of the loss scale.

        Comm: as `full_parameters`.
        """
        scale, reduced = self._scaler.get_scale(), ((name, p.grad) for name, p in self._owned())
        return self._split.merged((n, self._gathered(grad) / scale) for n, grad in reduced if grad is not None)

    def _gathered(self, sharded: Any) -> torch.Tensor:
        # Offloaded shards are gathered by the device's backend, too.
        return sharded.detach().to(self.mesh.device).full_tensor().cpu()

    def state(self) -> State:
        """Masters and optimizer states of the rows that this rank owns."""
        states = self._optimizer.state
        owned = {name: local_part(p).numel() for name, p in self._trained()}
        return {
            name: {MASTER: live(p, owned[name])} | {k: entry(states[p], k, owned[name]) for k in states.get(p, {})}
            for name, p in self._trained()
            if owned[name]
        }

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

    def _owned(self) -> list[tuple[str, Any]]:
        """All but copies of what another pipeline stage owns."""
        return [(name, p) for name, p in self._parameters.items() if self._split.owns(name)]

    def _trained(self) -> list[tuple[str, Any]]:
        """What this rank's optimizer updates."""
        return [(name, p) for name, p in self._owned() if p.requires_grad]

    def _shards(self) -> dict[str, torch.Tensor]:
        return {name: local_part(p) for name, p in self._parameters.items()}

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's rows."""
        return self._split.shared(self._shards())

    def parameter_hash(self) -> str | None:
        """With several copies of the model, the hash of this rank's copy.

        Comm: then a gather of each rank's hash over the data ranks.
        """
        if self.config.parallel.dp_replicate == 1:
            return None
        hashes = self.mesh.gather_over_dp(content_hash(self._parameters.values()))
        size = self._arguments.mesh["dp_shard"]
        first = self.mesh.grid.dp_rank // size * size
        return hashlib.blake2b("".join(hashes[first : first + size]).encode(), digest_size=6).hexdigest()

    def facts(self) -> EngineFacts:
        """Measures the shards and the optimizer, and asks FSDP2 what it was set up to do."""
        parameters = list(self._parameters.values())
        settings = _settings(self._typical_group())
        return EngineFacts(
            engine="FSDP2",
            optimizer=type(self._optimizer).__name__,
            stage=None,
            group_size=parameters[0].device_mesh.size(),
            param_device=devices(parameters),
            optimizer_device=devices(grouped_parameters(self._optimizer)),
            param_bytes=storage_bytes(parameters),
            optimizer_bytes=storage_bytes(state_tensors(self._optimizer)),
            nvme_bytes=0,
            compute_dtype=settings["precision.dtype"],
            settings=settings
            | {
                "parallel.tp": tensor_ranks(self._split, self._parameters.items()),
                "parallel.pp": pipeline_ranks(self._split, self._parameters),
            },
        )

    def _typical_group(self) -> FSDPModule:
        ours = ends(self.module)
        return [module for module in fsdp_modules(self.module) if module not in ours][-1]

    def close(self) -> None:
        """Nothing is held outside Python's memory."""


def mixed_precision_policy(arguments: FSDP2Arguments) -> MixedPrecisionPolicy:
    """The formats of gathered parameters and of reduced gradients."""
    param_dtype = None if arguments.param_dtype is None else TORCH_DTYPES[arguments.param_dtype]
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=TORCH_DTYPES[arguments.reduce_dtype])


def offload_policy(arguments: FSDP2Arguments) -> OffloadPolicy:
    """Where parameters, gradients and optimizer states stay."""
    return CPUOffloadPolicy(arguments.pin_memory) if arguments.cpu_offload else OffloadPolicy()


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """The modules that gather parameters, the model itself first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def sum_over_ranks(root: nn.Module) -> None:
    """Makes gradients sums over the ranks instead of means: shares of the step's gradient add up."""
    for part in fsdp_modules(root):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def _widen(parameter: Any, _: torch.Tensor) -> None:
    """Moves a whole parameter's gradient into FSDP2's sum of them."""
    parameter.accumulate_unsharded_grad_if_needed()
    parameter.to_accumulated_grad_if_needed()


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _prefetch(modules: list[Any], depth: int) -> None:
    """Each group's gather also starts those of the next ones, in the order in which a model holds its modules."""
    for index, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + depth])
        module.set_modules_to_backward_prefetch(modules[max(0, index - depth) : index][::-1])


def _settings(module: FSDPModule) -> dict[str, Any]:
    """What a module's group was set up to do, by the config's keys."""
    state = module._get_fsdp_state()
    group: Any = state._fsdp_param_group
    axes, after = group.mesh_info.mesh, group.post_forward_mesh_info
    shards = group.mesh_info.shard_mesh_size
    reshard: bool | int = after is not None
    if after is not None and after.shard_mesh_size != shards:
        reshard = after.shard_mesh_size
    return {
        "parallel.dp_replicate": axes.size() // shards,
        "parallel.dp_shard": shards,
        "fsdp.reshard_after_forward": reshard,
        "fsdp.cpu_offload": isinstance(group.offload_policy, CPUOffloadPolicy),
        "precision.dtype": DTYPE_NAMES[group.mp_policy.param_dtype or torch.float32],
        "precision.communication_data_type": DTYPE_NAMES[group.mp_policy.reduce_dtype or torch.float32],
    }
