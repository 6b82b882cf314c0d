"""PyTorch DistributedDataParallel: fp32 masters on every rank, gradients averaged by all-reduce in buckets.

Under a pipeline the model stays as it is: DDP reduces in a backward pass, of which there are many in a step there, and
would hold buckets as large as the gradients for nothing. They are reduced in buckets after all passes instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import ceil
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.torch.arguments import ddp_arguments
from ds_trainer.distributed.process_groups import Mesh, release_at_exit
from ds_trainer.engines.base import EngineFacts, OptimizerFactory, StepOutcome
from ds_trainer.engines.clip import norm_over_group
from ds_trainer.engines.clipped_step import clipped_step
from ds_trainer.engines.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ds_trainer.engines.grad_sync import average_over_ranks, fill_where_others_have
from ds_trainer.engines.introspect import (
    content_hash,
    devices,
    grouped_parameters,
    pipeline_ranks,
    state_tensors,
    storage_bytes,
    tensor_ranks,
)
from ds_trainer.engines.state_handles import MASTER, State, entry, live
from ds_trainer.errors import EngineError, ModelError
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.load_weights import load_full
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit

# Renamed in torch 2.13, which warns about the old name.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_POWERSGD_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


class DDPEngine:
    """The `ddp` engine.

    Below fp32 the forward runs under autocast, so that masters, gradients and their reduction stay fp32; fp16 adds a
    dynamic loss scale.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    supports_pipeline: ClassVar[bool] = True

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        self._resolved, self.config = resolved, resolved.config
        self.mesh = mesh
        self.module: Any  # its attributes are those of DistributedDataParallel
        # A static graph is recorded in a pass that reduces: DDP asserts so.
        self._reduced_once = not self.config.ddp.static_graph
        self._compute_dtype = TORCH_DTYPES[self.config.precision.dtype or "fp32"]
        scale = self.config.precision.loss_scale
        self._hook: Any = None  # PowerSGD's state
        self._scaler = torch.amp.GradScaler(
            mesh.device.type,
            enabled=self._compute_dtype == torch.float16,
            init_scale=2.0**scale.initial_scale_power,
            growth_interval=scale.loss_scale_window,
        )

    def load(self, model: nn.Module, weights: WeightSource, split: ModelSplit) -> None:
        """Every rank holds the whole model, of a split one its tensor rank's part, in fp32."""
        self._model, self._split = model, split
        load_full(model, weights, self.mesh.device, torch.float32)

    def wrap(self, make_optimizer: OptimizerFactory) -> None:
        """Wraps the model and builds the optimizer on its parameters."""
        self._optimizer = make_optimizer(self._trained())
        self._wrap_model()
        release_at_exit(self.close)

    def _wrap_model(self) -> None:
        if self._split.stages is not None:
            self.module = self._model
            return
        sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: False}  # They are the same everywhere, and nothing updates them.
        self.module = DistributedDataParallel(
            self._model,
            device_ids=[self.mesh.device.index] if self.mesh.device.type == "cuda" else None,
            process_group=self.mesh.dp_group,
            # All ranks have read the same values, which a hash proves after set-up: a broadcast would copy them again.
            init_sync=False,
            **ddp_arguments(self._resolved),
            **sync_buffers,
        )
        self._register_comm_hook()
        self._check_one_bucket(self.config.ddp.bucket_cap_mb)

    def _check_one_bucket(self, first_bucket_mb: int) -> None:
        """Over gloo PowerSGD hangs or aborts with several buckets: threads of its own issue each one's collectives.

        Args:
            first_bucket_mb: MiB in the smallest bucket.

        Raises:
            EngineError: There would be several.
        """
        gradients_mb = sum(p.numel() for _, p in self._trained()) * 4 / 2**20
        if (
            self.config.ddp.comm_hook == "powersgd"
            and self.mesh.device.type == "cpu"
            and gradients_mb > first_bucket_mb
        ):
            enough = max(ceil(gradients_mb), 26)  # 25 is the default, which accelerate does not hand on.
            raise EngineError(
                f"ddp.comm_hook is powersgd on cpu, with {gradients_mb:.0f} MiB of gradients in buckets of "
                f"{first_bucket_mb} MiB",
                "over gloo torch's PowerSGD works in one bucket only: with more, ranks differ in the order of their "
                "collectives",
                f"set ddp.bucket_cap_mb to {enough}, or ddp.comm_hook to fp16",
            )

    def _register_comm_hook(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        match self.config.ddp.comm_hook:
            case "bf16":
                self.module.register_comm_hook(self.mesh.dp_group, default_hooks.bf16_compress_hook)
            case "fp16":
                self.module.register_comm_hook(self.mesh.dp_group, default_hooks.fp16_compress_hook)
            case "powersgd":
                state = powerSGD_hook.PowerSGDState(
                    self.mesh.dp_group,
                    matrix_approximation_rank=self.config.ddp.powersgd_rank,
                    # As early as torch can: its default, the 1000th reduction, would outlast many a fine-tuning.
                    start_powerSGD_iter=2,
                )
                self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
                self._hook = state

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Reduces gradients in the last micro-batch only; a static graph's very first one too."""
        with nullcontext() if is_last or not self._reduced_once else self._no_sync():
            yield
        self._reduced_once = True

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def forward(self, **inputs: Any) -> Any:
        """Calls the wrapped model, below fp32 under autocast."""
        with self.autocast():
            return self.module(**inputs)

    def autocast(self) -> AbstractContextManager[None]:
        """Autocast below fp32."""
        lower = self._compute_dtype != torch.float32
        return torch.autocast(self.mesh.device.type, self._compute_dtype, enabled=lower)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """DDP averages over the data ranks, so this rank's share is multiplied by their number."""
        return self._scaler.scale(loss * self.mesh.grid.dp_size)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates in fp32; DDP's hooks reduce."""
        self.scale_loss(loss).backward()

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Reduces gradients at its end, in buckets of `ddp.bucket_cap_mb`.

        Comm: copies of tied parameters send theirs to their owners, then one all-reduce per bucket over the data ranks.
        """
        # Makes the scaler's scale: only the last stage has a loss to multiply by it.
        self._scaler.scale(torch.zeros((), device=self.mesh.device))
        yield
        self._split.sum_tied({name: p.grad for name, p in self._model.named_parameters()})
        for name, parameter in self._model.named_parameters():
            if not self._split.owns(name):
                parameter.grad = None
        trained = [parameter for _, parameter in self._trained()]
        if self._may_be_unused:
            fill_where_others_have(trained, self.mesh.dp_host_group)
        else:
            self._require_all_used()
        sent_as = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.ddp.comm_hook or "")
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        average_over_ranks(gradients, self.mesh.dp_group, self.config.ddp.bucket_cap_mb * 2**20, sent_as)

    @property
    def _may_be_unused(self) -> bool:
        """Whether a step's loss need not depend on every parameter."""
        return self.config.ddp.find_unused_parameters or self.config.ddp.static_graph

    def optimizer_step(self) -> StepOutcome:
        """Clips by the global norm and updates; a gradient that is not finite is dropped."""
        if not self._may_be_unused:
            self._require_all_used()
        gradients = {name: p.grad for name, p in self._trained() if p.grad is not None}
        counted = [part for name, grad in gradients.items() for part in self._split.counted(name, grad)]
        outcome = clipped_step(
            self._optimizer,
            self._scaler,
            list(gradients.values()),
            counted,
            self.config.optimizer,
            self._over_model_ranks,
        )
        self._split.refresh_tied(dict(self._model.named_parameters()))
        return outcome

    def _over_model_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        return norm_over_group(norm, self.config.optimizer.norm_type, self.mesh.model_host_group)

    def _require_all_used(self) -> None:
        """DDP reduces a bucket when all of its parameters have a gradient, so one without leaves others unreduced.

        Raises:
            ModelError: The step's loss does not depend on a parameter that is trained.
        """
        unused = [name for name, parameter in self._trained() if parameter.grad is None]
        if unused:
            raise ModelError(
                f"the loss of this step does not depend on {len(unused)} trained parameters: {', '.join(unused[:5])}"
                + (", ..." if len(unused) > 5 else ""),
                "DDP waits for a gradient of every parameter that requires one",
                "call requires_grad_(False) on parameters that are never used before Trainer(model=...); where some "
                "steps use them, set ddp.find_unused_parameters to true",
            )

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self._optimizer.param_groups

    def parameter_layout(self) -> list[ParameterSlice]:
        """Every rank owns all that it holds and is trained."""
        return [self._split.slice(name, tuple(p.shape), (0, p.numel())) for name, p in self._trained()]

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, from this rank's own copy and those of the other ranks of a copy of the model."""
        return self._split.merged((name, p.detach().cpu()) for name, p in self._model.named_parameters())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every gradient, from this rank's own copy and those of the other ranks of a copy of the model."""
        scale = self._scaler.get_scale()
        reduced = ((name, p.grad) for name, p in self._model.named_parameters())
        return self._split.merged((n, grad.detach().float().cpu() / scale) for n, grad in reduced if grad is not None)

    def state(self) -> State:
        """Masters and optimizer states of every parameter that is trained."""
        states = self._optimizer.state
        return {
            name: {MASTER: live(p, p.numel())} | {k: entry(states[p], k, p.numel()) for k in states.get(p, {})}
            for name, p in self._trained()
        }

    def scalar_state(self) -> dict[str, Any]:
        """The loss scale, and how often PowerSGD has run."""
        return {"loss_scale": self._scaler.state_dict()} | ({"powersgd": self._hook.iter} if self._hook else {})

    def load_scalar_state(self, values: Mapping[str, Any]) -> None:
        """Sets them."""
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(values["loss_scale"]))
        if self._hook:
            self._hook.iter = values["powersgd"]

    def rank_state(self) -> dict[str, torch.Tensor]:
        """What PowerSGD keeps for each bucket: the error it owes, and the factors it starts from."""
        if not self._hook:
            return {}
        memories = {part: getattr(self._hook, part) for part in _POWERSGD_MEMORIES}
        return {f"{part}.{bucket}": t for part, memory in memories.items() for bucket, t in memory.items()}

    def load_rank_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets it."""
        for name, tensor in tensors.items():
            part, _, bucket = name.partition(".")
            getattr(self._hook, part)[int(bucket)] = tensor.to(self.mesh.device)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """What this rank's optimizer updates."""
        named = self._model.named_parameters()
        return [(name, p) for name, p in named if p.requires_grad and self._split.owns(name)]

    def parameter_hash(self) -> str:
        """Every data rank holds every parameter of its tensor rank and its stages."""
        return content_hash(self._model.parameters())

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """Whole."""
        return self._split.shared(dict(self._model.named_parameters()))

    def facts(self) -> EngineFacts:
        """Measures the wrapped model and the optimizer."""
        named = dict(self._model.named_parameters())
        parameters = list(named.values())
        return EngineFacts(
            engine=(type(self.module) if self._split.stages is None else type(self)).__name__,
            optimizer=type(self._optimizer).__name__,
            stage=None,
            group_size=self._group_size(),
            param_device=devices(parameters),
            optimizer_device=devices(grouped_parameters(self._optimizer)),
            param_bytes=storage_bytes(parameters),
            optimizer_bytes=storage_bytes(state_tensors(self._optimizer)),
            nvme_bytes=0,
            compute_dtype=DTYPE_NAMES[self._compute_dtype],
            settings={
                "parallel.tp": tensor_ranks(self._split, named.items()),
                "parallel.pp": pipeline_ranks(self._split, named),
            },
        )

    def _group_size(self) -> int:
        return (self.mesh.dp_group if self._split.stages else self.module.process_group).size()

    def close(self) -> None:
        """Removes DDP's hooks from the model, which another engine may wrap then, and lets go of its process group."""
        if isinstance(getattr(self, "module", None), DistributedDataParallel):
            self.module._remove_autograd_hooks()
            self.module = self._model
