"""accelerate over FSDP2, on GPUs only: on CPU it ignores its FSDP plugin."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ds_trainer.config.accelerate.arguments import accelerate_arguments
from ds_trainer.engines.accelerate.accelerator import check_prepared, configured_by_json, make_accelerator
from ds_trainer.engines.fsdp2.engine import (
    FSDP2Engine,
    fsdp_modules,
    mixed_precision_policy,
    offload_policy,
    sum_over_ranks,
)


class AccelerateFSDP2Engine(FSDP2Engine):
    """`FSDP2Engine` whose model accelerate shards, on meta: each rank still reads its own rows only.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    def _shard(self, model: nn.Module) -> None:
        arguments = accelerate_arguments(self._resolved)
        # Losses are divided by the label tokens of the step already; accelerate would divide them once more.
        options: dict[str, Any] = arguments.accelerator | {"gradient_accumulation_steps": 1}
        if arguments.scaler is not None:
            options["kwargs_handlers"] = [GradScalerKwargs(**arguments.scaler)]
        # prepare() requires an optimizer beside the model; the run's own is built on the rows afterwards.
        placeholder = torch.optim.SGD([{"params": []}])
        with configured_by_json(self.mesh):
            if arguments.parallelism is not None:
                options["parallelism_config"] = ParallelismConfig(**arguments.parallelism)
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                **arguments.fsdp or {},
                mixed_precision_policy=mixed_precision_policy(self._arguments),
                cpu_offload=offload_policy(self._arguments),
            )
            self.accelerator = make_accelerator(self.mesh, **options)
            self.accelerator.prepare(model, placeholder)
        check_prepared(model, FSDPModule, self.accelerator, self._resolved)
        sum_over_ranks(model)
        self._scaler = self.accelerator.scaler or self._scaler

    def backward(self, loss: torch.Tensor) -> None:
        """As in `FSDP2Engine`; accelerate scales the loss of fp16."""
        self.accelerator.backward(loss)

    def _typical_group(self) -> FSDPModule:
        """The first block: accelerate never frees the norm, the head and what the model itself gathers."""
        embedding = self.module.get_input_embeddings()
        return next(module for module in fsdp_modules(self.module)[1:] if module is not embedding)
