"""accelerate over DistributedDataParallel."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs
from torch.nn.parallel import DistributedDataParallel

from ds_trainer.config.accelerate.arguments import accelerate_arguments
from ds_trainer.engines.accelerate.accelerator import check_prepared, configured_by_json, make_accelerator
from ds_trainer.engines.ddp import DDPEngine
from ds_trainer.engines.introspect import TORCH_DTYPES
from ds_trainer.torch_internals import comm_hook_states


class AccelerateDDPEngine(DDPEngine):
    """`DDPEngine` whose model, dtype and loss scale are accelerate's."""

    def _wrap_model(self) -> None:
        arguments = accelerate_arguments(self._resolved)
        assert arguments.ddp is not None
        ddp = arguments.ddp | {"broadcast_buffers": False}  # They are equal on all ranks, and nothing updates them.
        if "comm_hook" in ddp:
            ddp["comm_hook"] = DDPCommunicationHookType(ddp["comm_hook"])  # Its name alone would be ignored.
        handlers: list[Any] = [DistributedDataParallelKwargs(**ddp)]
        if arguments.scaler is not None:
            handlers.append(GradScalerKwargs(**arguments.scaler))
        # Losses are divided by the label tokens of the step already; accelerate would divide them once more.
        options = arguments.accelerator | {"gradient_accumulation_steps": 1}
        with configured_by_json(self.mesh):
            self.accelerator = make_accelerator(self.mesh, **options, kwargs_handlers=handlers)
            with warnings.catch_warnings():
                # accelerate uses the name from before torch 2.13.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                self.module, prepared = self.accelerator.prepare(self._model, self._optimizer)
        if self.mesh.grid.world > 1:  # On a single GPU there is nothing to reduce, and accelerate wraps nothing.
            check_prepared(self.module, DistributedDataParallel, self.accelerator, self._resolved)
        # `optimizer_step` unscales, clips and drops a bad gradient; accelerate's wrapper would do both again.
        self._optimizer = prepared.optimizer
        self._scaler = self.accelerator.scaler or self._scaler
        # What exists, for the check after set-up.
        self._compute_dtype = TORCH_DTYPES.get(self.accelerator.mixed_precision, torch.float32)
        # accelerate passes on only what is not torch's default; with the default torch begins with a bucket of 1 MiB.
        self._check_one_bucket(1 if self.config.ddp.bucket_cap_mb == 25 else self.config.ddp.bucket_cap_mb)
        for state in comm_hook_states(self.module):
            self._hook = state  # None but for PowerSGD.

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self.module)

    def forward(self, **inputs: Any) -> Any:
        """Calls the wrapped model; below fp32 accelerate has put its forward under autocast."""
        return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """As in `DDPEngine`; accelerate scales the loss of fp16."""
        self.accelerator.backward(loss * self.mesh.grid.dp_size)

    def group_size(self) -> int:
        """1 on a single GPU, where accelerate wraps nothing."""
        return super().group_size() if isinstance(self.module, DistributedDataParallel) else 1

    def close(self) -> None:
        """Takes accelerate's autocast off the model, and the mark that it is prepared."""
        self.accelerator.unwrap_model(self.module, keep_fp32_wrapper=False)
        vars(self._model).pop("_is_accelerate_prepared", None)
        super().close()
