"""PyTorch DistributedDataParallel: fp32 masters on every rank, gradients averaged by all-reduce in buckets.

Under a pipeline the model is not wrapped: DDP reduces in a backward pass, of which a pipeline's step has many, and its
buckets would take as much memory as the gradients. These are reduced in buckets after all passes instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.torch.arguments import ddp_arguments
from ds_trainer.distributed.process_groups import Mesh, release_at_exit
from ds_trainer.engines.base import EngineFacts, OptimizerFactory, StepOutcome
from ds_trainer.engines.grad_sync import average_over_ranks, fill_where_others_have
from ds_trainer.engines.torch_engine import TorchEngine
from ds_trainer.errors import EngineError, ModelError
from ds_trainer.torch_internals import remove_hooks

# Renamed in torch 2.13, which warns about the old name.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_POWERSGD_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


class DDPEngine(TorchEngine):
    """The `ddp` engine.

    Below fp32 the forward runs under autocast, so that masters, gradients and their reduction stay fp32; fp16 adds a
    dynamic loss scale.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    supports_pipeline: ClassVar[bool] = True

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        super().__init__(resolved, mesh)
        # DDP asserts that it records a static graph in a pass that reduces.
        self._reduced_once = not self.config.ddp.static_graph
        self._hook: Any = None  # PowerSGD's state

    def wrap(self, make_optimizer: OptimizerFactory) -> None:
        """Builds the optimizer on the model's parameters, and wraps the model."""
        super().wrap(make_optimizer)
        self._model = self.module
        if self._split.stages is None:
            self._wrap_model()
        release_at_exit(self.close)

    def _wrap_model(self) -> None:
        sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: False}  # They are equal on all ranks, and nothing updates them.
        self.module = DistributedDataParallel(
            self._model,
            device_ids=[self.mesh.device.index] if self.mesh.device.type == "cuda" else None,
            process_group=self.mesh.dp_group,
            # All ranks have read the same values, and a hash checks that after set-up: a broadcast would add nothing.
            init_sync=False,
            **ddp_arguments(self._resolved),
            **sync_buffers,
        )
        self._register_comm_hook()
        self._check_one_bucket(self.config.ddp.bucket_cap_mb)

    def _check_one_bucket(self, first_bucket_mb: int) -> None:
        """Refuses several buckets for PowerSGD over gloo: threads issue their collectives, and it hangs or aborts.

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
            enough = max(ceil(gradients_mb), 26)  # 25 is the default, which accelerate does not pass on.
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
                    # As early as torch can: many a fine-tuning is over before its default, the 1000th reduction.
                    start_powerSGD_iter=2,
                )
                self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
                self._hook = state

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Reduces gradients in the last micro-batch only, and for a static graph in the run's first one."""
        with nullcontext() if is_last or not self._reduced_once else self._no_sync():
            yield
        self._reduced_once = True

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """DDP averages over the data-parallel ranks, so this rank's share is multiplied by their number."""
        return super().scale_loss(loss * self.mesh.grid.dp_size)

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Reduces gradients at its end, in buckets of `ddp.bucket_cap_mb`.

        Comm: replicas of tied parameters send theirs to their owners, then one all-reduce per bucket over the
            data-parallel ranks.
        """
        self.start_pipeline()
        yield
        self.sum_tied_gradients()
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
        """As in `TorchEngine`.

        Raises:
            ModelError: The step's loss does not depend on a parameter that is trained.
        """
        if not self._may_be_unused:
            self._require_all_used()
        return super().optimizer_step()

    def _require_all_used(self) -> None:
        """DDP reduces a bucket when all its parameters have a gradient: one without leaves the others unreduced.

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

    def scalar_state(self) -> dict[str, Any]:
        """The loss scale, and how often PowerSGD has run."""
        return super().scalar_state() | ({"powersgd": self._hook.iter} if self._hook else {})

    def load_scalar_state(self, values: Mapping[str, Any]) -> None:
        """Sets them."""
        super().load_scalar_state(values)
        if self._hook:
            self._hook.iter = values["powersgd"]

    def rank_state(self) -> dict[str, torch.Tensor]:
        """What PowerSGD keeps for each bucket: the error of its compression, and the factors that it starts from."""
        if not self._hook:
            return {}
        memories = {part: getattr(self._hook, part) for part in _POWERSGD_MEMORIES}
        return {f"{part}.{bucket}": t for part, memory in memories.items() for bucket, t in memory.items()}

    def load_rank_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets it."""
        for name, tensor in tensors.items():
            part, _, bucket = name.partition(".")
            getattr(self._hook, part)[int(bucket)] = tensor.to(self.mesh.device)

    def group_size(self) -> int:
        """Ranks of the group that DDP reduces over."""
        return super().group_size() if self._split.stages else self.module.process_group.size()

    def facts(self) -> EngineFacts:
        """As in `TorchEngine`; `engine` is the class of the wrapper."""
        facts = super().facts()
        return facts if self._split.stages else replace(facts, engine=type(self.module).__name__)

    def close(self) -> None:
        """Removes DDP's hooks, so that other engines may wrap the model, and drops the wrapper with its group."""
        if isinstance(getattr(self, "module", None), DistributedDataParallel):
            remove_hooks(self.module)
            self.module = self._model
