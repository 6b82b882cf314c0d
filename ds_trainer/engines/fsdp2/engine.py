"""PyTorch FSDP2: fp32 masters, gradients and optimizer states sharded by rows over the data-parallel ranks.

Where tensor parallelism has split the model, FSDP2 shards what each tensor-parallel rank holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.torch.arguments import FSDP2Arguments, fsdp2_arguments
from ds_trainer.distributed.device_mesh import device_mesh
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import EngineFacts
from ds_trainer.engines.clip import norm_over_group
from ds_trainer.engines.fsdp2.load import first_row, load_sharded, shard_range
from ds_trainer.engines.fsdp2.wrap import ends, groups
from ds_trainer.engines.introspect import DTYPE_NAMES, TORCH_DTYPES, content_hash, local_shard
from ds_trainer.engines.torch_engine import TorchEngine
from ds_trainer.models.load_weights import fill_buffers
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.torch_internals import finish_backward, parameter_group


class FSDP2Engine(TorchEngine):
    """The `fsdp2` engine.

    Below fp32 gathered parameters are cast, so that masters stay fp32; fp16 adds a dynamic loss scale.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    supports_pipeline: ClassVar[bool] = True

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        super().__init__(resolved, mesh)
        self._arguments = fsdp2_arguments(resolved)
        self._accumulates_wide = False

    def load(self, model: nn.Module, weights: WeightSource, split: ModelSplit) -> None:
        """Shards the model; each rank reads and keeps its own rows only."""
        self._split = split
        fill_buffers(model, weights, self.mesh.device)
        if self._arguments.buffer_dtype is not None:
            _cast_buffers(model, TORCH_DTYPES[self._arguments.buffer_dtype])
        device = torch.device("cpu") if self._arguments.cpu_offload else self.mesh.device
        self._parameters = load_sharded(model, weights, lambda: self._shard(model), device)
        self.module = model

    def _shard(self, model: nn.Module) -> None:
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
            sharded: Any = fully_shard(module, reshard_after_forward=False if module is head else reshard, **shared)
            if module is embeddings and isinstance(module, nn.Embedding):
                sharded.set_unshard_in_backward(False)  # Its backward pass looks at the indices only.
        # The backward pass begins with what the model itself gathers, which would be gathered again at once.
        fully_shard(model, reshard_after_forward=False if modules else reshard, **shared)
        sum_over_ranks(model)
        if depth := self.config.fsdp.prefetch_depth:
            _prefetch(modules, depth)

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
        """Gathered parameters have the dtype already; they are freed at the end, as a backward pass frees them."""
        try:
            yield
        finally:
            for module in fsdp_modules(self.module):
                module.reshard()

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Keeps full gradients over all passes and reduces them at its end.

        Gathered parameters stay gathered, too, where fsdp.reshard_after_forward is false.

        Comm: at its end one reduce-scatter of each group's gradients over the data-parallel ranks of a replica of the
            model, one all-reduce over the replicas; then replicas of tied parameters send their shards to the owners.
        """
        self.start_pipeline()
        root = self.module
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(self._arguments.reshard_after_forward is not False)
        self._accumulate_wide()
        yield
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        finish_backward(root)  # For the groups that the last pass has left out.
        self.sum_tied_gradients()

    def _accumulate_wide(self) -> None:
        """Adds each gradient to a sum in the dtype of the reduction as soon as it is computed.

        FSDP2 does so at the end of a backward pass through a group. Passes that compute only the gradients of weights
        never reach that end, and would add them up in the parameters' dtype.
        """
        if self._accumulates_wide or self._arguments.param_dtype in (None, self._arguments.reduce_dtype):
            return
        self._accumulates_wide = True
        for module in fsdp_modules(self.module):
            module.unshard()  # Makes the full parameters, which stay the same objects from then on.
            group = parameter_group(module)
            for parameter in group.fsdp_params if group else ():
                if parameter.unsharded_param.requires_grad:
                    parameter.unsharded_param.register_post_accumulate_grad_hook(partial(_widen, parameter))

    def norm_over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm over the shards of all ranks, each of which `dp_replicate` ranks hold.

        Comm: one all-reduce of 8 bytes over all ranks.
        """
        replicas = self.config.parallel.dp_replicate
        return norm_over_group(norm, self.config.optimizer.norm_type, self.mesh.host_group, replicas)

    def owned_range(self, parameter: Any) -> tuple[int, int] | None:
        """This rank's rows; None where there are fewer rows than ranks and none is left for it."""
        return shard_range(parameter) if local_shard(parameter).numel() else None

    def first_row(self, parameter: Any) -> int:
        """Number of this rank's first row."""
        return first_row(parameter)

    def gathered(self, tensor: Any) -> torch.Tensor:
        """The full tensor on the host.

        Comm: one all-gather over the data-parallel ranks of one replica.
        """
        # The device's backend gathers offloaded shards, too.
        return tensor.detach().to(self.mesh.device).full_tensor().cpu()

    def parameter_hash(self) -> str | None:
        """With several replicas of the model, the hash of this rank's replica.

        Comm: then a gather of each rank's hash over the data-parallel ranks.
        """
        if self.config.parallel.dp_replicate == 1:
            return None
        hashes = self.mesh.gather_over_dp(content_hash(self._parameters.values()))
        size = self._arguments.mesh["dp_shard"]
        first = self.mesh.grid.dp_rank // size * size
        return hashlib.blake2b("".join(hashes[first : first + size]).encode(), digest_size=6).hexdigest()

    def group_size(self) -> int:
        """Ranks of the device mesh that the parameters are sharded and replicated on."""
        return next(iter(self._parameters.values())).device_mesh.size()

    def facts(self) -> EngineFacts:
        """As in `TorchEngine`, and what FSDP2 was set up to do."""
        facts, settings = super().facts(), _settings(self._typical_group())
        return replace(
            facts, engine="FSDP2", compute_dtype=settings["precision.dtype"], settings=settings | dict(facts.settings)
        )

    def _typical_group(self) -> FSDPModule:
        ours = ends(self.module)
        return [module for module in fsdp_modules(self.module) if module not in ours][-1]


def mixed_precision_policy(arguments: FSDP2Arguments) -> MixedPrecisionPolicy:
    """The dtypes of gathered parameters and of reduced gradients."""
    param_dtype = None if arguments.param_dtype is None else TORCH_DTYPES[arguments.param_dtype]
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=TORCH_DTYPES[arguments.reduce_dtype])


def offload_policy(arguments: FSDP2Arguments) -> OffloadPolicy:
    """Where parameters, gradients and optimizer states stay."""
    return CPUOffloadPolicy(arguments.pin_memory) if arguments.cpu_offload else OffloadPolicy()


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """The modules that gather parameters, the model itself first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def sum_over_ranks(root: nn.Module) -> None:
    """Makes gradients sums over the ranks instead of means: the ranks' shares of the step's loss add up."""
    for module in fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _widen(parameter: Any, _: torch.Tensor) -> None:
    """Moves a full parameter's gradient into FSDP2's sum."""
    parameter.accumulate_unsharded_grad_if_needed()
    parameter.to_accumulated_grad_if_needed()


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _prefetch(modules: list[Any], depth: int) -> None:
    """Starts the gathers of the next groups with each group's own, in the order of the model's modules."""
    for index, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + depth])
        module.set_modules_to_backward_prefetch(modules[max(0, index - depth) : index][::-1])


def _settings(module: FSDPModule) -> dict[str, Any]:
    """What a module's group was set up to do, by the config's keys."""
    group: Any = parameter_group(module)
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
