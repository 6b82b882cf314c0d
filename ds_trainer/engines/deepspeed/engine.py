"""DeepSpeed ZeRO 0-3 with CPU and NVMe offload.

The accumulation boundary is set by hand for every micro-batch, since the last window of an epoch may be short, and
losses arrive already divided by the step's label tokens, so DeepSpeed's own division by accumulation is switched off.

Under a pipeline the model is called without DeepSpeed's engine, which allows one forward and one backward at a time:
its optimizer's hooks accumulate, and the engine reduces and updates once.
"""

from __future__ import annotations

import io
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from math import isfinite
from typing import Any, ClassVar

import deepspeed
import deepspeed.comm
import torch
from torch import nn

from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.deepspeed.native_keys import ReadRecorder
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import EngineFacts, OptimizerFactory, StepOutcome
from ds_trainer.engines.clip import clip_by_norm, global_norm, norm_over_group
from ds_trainer.engines.deepspeed.facts import measure
from ds_trainer.engines.deepspeed.internals import accumulated_gradient, full_gradient, link_states
from ds_trainer.engines.deepspeed.mpu import ModelParallelUnit, counts_in_norm
from ds_trainer.engines.deepspeed.nvme_check import check_gradient_offsets
from ds_trainer.engines.deepspeed.ordered_reduction import OrderedReduction
from ds_trainer.engines.deepspeed.pipeline import check_parameter_groups, reduce_accumulated
from ds_trainer.engines.deepspeed.state import catch_up_cpu_adam, load_wide_masters, owned_slices, state_handles
from ds_trainer.engines.deepspeed.zero3_gather import gather_together
from ds_trainer.engines.deepspeed.zero3_load import load_partitioned
from ds_trainer.engines.grad_sync import ReplicaGradients
from ds_trainer.engines.introspect import TORCH_DTYPES, content_hash
from ds_trainer.engines.state_handles import State
from ds_trainer.errors import EngineError
from ds_trainer.host.deepspeed_ops import disable_shm_comm
from ds_trainer.host.swap_folder import SwapFolder
from ds_trainer.layout import ParameterSlice
from ds_trainer.models.load_weights import load_full
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit

_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class DeepSpeedEngine:
    """The `deepspeed` engine.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    supports_pipeline: ClassVar[bool] = True

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        self._resolved, self.config = resolved, resolved.config
        self.mesh = mesh
        self.module: Any  # DeepSpeed's engine: its attributes are those of no annotated class
        self.native = to_deepspeed(resolved)
        self.stage = self.config.zero.stage
        if self._clips_itself:
            self.native["gradient_clipping"] = 0.0
        if mesh.grid.pp_size > 1 and "bf16" in self.native:
            # Adds gradients to fp32 sums as they are computed: otherwise only its engine's `backward` does.
            self.native["bf16"]["immediate_grad_update"] = True
        self._swaps: list[SwapFolder] = []
        self._compute_dtype = TORCH_DTYPES[self.config.precision.dtype or "fp32"]
        _quieten()
        if mesh.device.type == "cpu":
            disable_shm_comm()
        deepspeed.init_distributed(dist_backend="nccl" if mesh.device.type == "cuda" else "gloo", verbose=False)
        # DeepSpeed keeps it for the process: this engine would reduce over the groups of an earlier one.
        deepspeed.utils.groups.mpu = None
        self._redirect_swap_files()

    @property
    def _param_dtype(self) -> torch.dtype:
        """Dtype in which DeepSpeed holds parameters: fp32 where bf16 runs under autocast (stage 0)."""
        autocast = self.stage == 0 and self._compute_dtype == torch.bfloat16
        return torch.float32 if autocast else self._compute_dtype

    def _redirect_swap_files(self) -> None:
        """Gives this run and rank a swap folder of its own below each nvme_path."""
        sections = [
            section
            for key in ("offload_optimizer", "offload_param")
            if (section := self.native["zero_optimization"].get(key)) and section["device"] == "nvme"
        ]
        if not sections:
            return
        run_id = self.mesh.gather_over_world(uuid.uuid4().hex[:12])[0]
        folders: dict[str, SwapFolder] = {}
        for section in sections:
            path = section["nvme_path"]
            if path not in folders:
                folders[path] = SwapFolder(path, run_id, self.mesh.grid.rank)
            section["nvme_path"] = str(folders[path].path)
        self._swaps = list(folders.values())

    def load(self, model: nn.Module, weights: WeightSource, split: ModelSplit) -> None:
        """Stages 0-2: full tensors on every rank. Stage 3: each rank reads and keeps its own flat slices only.

        Where tensor parallelism has split the model, full means all that this tensor-parallel rank holds.
        """
        self._model, self._weights, self._split = model, weights, split
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if self.stage == 3:
            gather_together(model, self.config.model)
            load_partitioned(model, weights, self.native, self._param_dtype, self.mesh)
        else:
            load_full(model, weights, self.mesh.device, self._param_dtype)
        replicas = {name: p for name, p in model.named_parameters() if not split.owns(name)}
        self._replica_gradients = ReplicaGradients(replicas, TORCH_DTYPES[self.config.precision.grad_dtype or "fp32"])
        if not self._clips_itself:
            for name, parameter in self._named():
                parameter.model_parallel = counts_in_norm(name, split)

    def wrap(self, make_optimizer: OptimizerFactory) -> None:
        """Builds the optimizer and DeepSpeed's engine around it.

        Raises:
            EngineError: DeepSpeed ignored a key of its JSON, or would read gradients from NVMe wrongly, or pipeline
                stages differ in their parameter groups.
        """
        trainable = [(n, p) for n, p in self._named() if p.requires_grad]
        optimizer = make_optimizer(trainable)
        check_parameter_groups(optimizer, self.stage, self.mesh)
        recorder = ReadRecorder(self.native)
        # Some of its optimizers print the machine's memory as they are built.
        with _without_compiler(), redirect_stdout(io.StringIO()):
            self.module = self._initialize(optimizer, recorder)
        if recorder.unread():
            raise EngineError(
                f"DeepSpeed {deepspeed.__version__} never read {', '.join(recorder.unread())}",
                "a key that is set must have an effect",
                "remove it from native.deepspeed, or install a DeepSpeed that knows it",
            )
        if getattr(self.module.optimizer, "swap_optimizer", False):
            check_gradient_offsets(self.module.optimizer)
        if hasattr(self.module.optimizer, "reduce_ready_partitions_and_remove_grads") and self.stage < 3:
            OrderedReduction(self.module.optimizer, [p for _, p in trainable])
        if self.stage > 0 and self._param_dtype != torch.float32:
            load_wide_masters(self.module, trainable, self._owned(), self._weights)
        del self._weights

    def _initialize(self, optimizer: torch.optim.Optimizer, config: ReadRecorder) -> deepspeed.DeepSpeedEngine:
        engine, *_ = deepspeed.initialize(
            model=self._model,
            optimizer=optimizer,
            config=config,
            mpu=ModelParallelUnit(self.mesh) if self.mesh.grid.model_size > 1 else None,
            dist_init_required=False,
        )
        return engine

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Marks the accumulation boundary."""
        self.module.set_gradient_accumulation_boundary(is_last)
        yield

    def forward(self, **inputs: Any) -> Any:
        """Calls DeepSpeed's engine, which gathers parameters and casts as configured; pipeline stages without it."""
        if self._split.stages is None:
            return self.module(**inputs)
        with self.autocast():
            return self._model(**inputs)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast where bf16 runs over fp32 parameters; at stage 3 these are freed at the end, as in a backward pass.

        DeepSpeed itself would keep them for the backward pass that followed the forward when it recorded their order.
        """
        lower = self._param_dtype != self._compute_dtype
        with torch.autocast(self.mesh.device.type, self._compute_dtype, enabled=lower):
            yield
        if self.stage == 3:
            self.module.empty_partition_cache()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """DeepSpeed averages over the data-parallel ranks, so this rank's share is multiplied by their number."""
        return self.module.scale(loss * self.mesh.grid.dp_size)

    def backward(self, loss: torch.Tensor) -> None:
        """As `scale_loss`; DeepSpeed itself applies the loss scale of fp16."""
        self.module.backward(loss * self.mesh.grid.dp_size, scale_wrt_gas=False)

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Lets DeepSpeed's hooks accumulate gradients, and reduces them at its end.

        Comm: replicas of tied parameters send their gradients to their owners, then DeepSpeed's reduction over the
            data-parallel ranks, in its buckets.
        """
        self.module.set_gradient_accumulation_boundary(False)
        yield
        shared = self._split.shared(dict(self._model.named_parameters()))
        optimizer = self.module.optimizer
        owned = {name: accumulated_gradient(optimizer, p) for name, p in shared.items() if self._split.owns(name)}
        self._split.sum_tied(owned | self._replica_gradients.take())
        reduce_accumulated(self.module, [p for _, p in self._named() if p.requires_grad], self.stage, self.mesh)

    def optimizer_step(self) -> StepOutcome:
        """One DeepSpeed step; ZeRO itself drops a gradient that is not finite, at stage 0 it is done here."""
        if self._clips_itself:
            gradients = {name: p.grad for name, p in self._named() if p.grad is not None}
            counted = [part for name, grad in gradients.items() for part in self._split.counted(name, grad)]
            norm = norm_over_group(global_norm(counted), "l2", self.mesh.model_host_group).item()
            if not isfinite(norm):
                self.module.zero_grad()
                return StepOutcome(float("inf"), skipped=True)
            clip_by_norm(list(gradients.values()), self.config.optimizer.max_grad_norm, norm)
            self._step()
            return StepOutcome(norm, skipped=False)
        self._step()
        skipped = not self.module.was_step_applied()
        norm = self.module.get_global_grad_norm()
        return StepOutcome(float("inf") if skipped or norm is None else float(norm), skipped)

    def _step(self) -> None:
        self.module.step()
        self._split.refresh_tied(dict(self._model.named_parameters()))

    @property
    def _clips_itself(self) -> bool:
        """At stage 0 gradients are clipped here: DeepSpeed would take their norm in fp32 (see `clip.global_norm`)."""
        return self.stage == 0 and self.config.precision.dtype != "fp16"

    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer below DeepSpeed's wrapper."""
        return self.module.basic_optimizer.param_groups

    def parameter_layout(self) -> list[ParameterSlice]:
        """Flat ranges: stage 3 shards every tensor, stages 1 and 2 the concatenation of each parameter group."""
        return list(self._owned().values())

    def _owned(self) -> dict[str, ParameterSlice]:
        return owned_slices(self._model, self._shapes, self.stage, self._split)

    def _named(self) -> Iterator[tuple[str, Any]]:
        """The parameters that this rank owns, with the attributes that DeepSpeed sets on them."""
        return ((name, p) for name, p in self._model.named_parameters() if self._split.owns(name))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """fp32 masters, gathered one at a time.

        Comm: one all-gather (stage 3) or all-reduce (stages 1, 2) of each tensor over the data-parallel ranks, one
            more all-gather over the tensor-parallel ranks where these shard it.
        """
        return self._split.merged(self._local_parameters())

    def _local_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._named():
            full = deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if full is None:
                with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                    full = parameter.detach().cpu().clone()
            yield name, full.detach().cpu().view(self._shapes[name])

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reduced gradients, gathered one at a time and freed of the loss scale.

        Comm: as `full_parameters`.
        """
        return self._split.merged(self._local_gradients())

    def _local_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        scale = getattr(self.module.optimizer, "loss_scale", 1.0)
        for name, parameter in self._named():
            if not parameter.requires_grad:
                continue
            grad = full_gradient(parameter)
            if grad is not None:
                yield name, grad.detach().float().cpu().view(self._shapes[name]) / scale

    def state(self) -> State:
        """This rank's fragments of masters and optimizer states; what is on NVMe goes through DeepSpeed's swapper.

        Raises:
            EngineError: fp16 at stage 0, whose optimizer keeps masters in buffers without a map to parameters.
        """
        if self.stage == 0 and self._param_dtype == torch.float16:
            raise EngineError(
                "zero.stage is 0 with precision.dtype fp16",
                "a checkpoint holds fp32 masters, which DeepSpeed keeps in one buffer per group at this stage",
                "set zero.stage to 1, or precision.dtype to bf16",
            )
        if self.stage in (1, 2):
            link_states(self.module.optimizer)
        owned = self._owned()
        return {
            name: state_handles(self.module, parameter, owned[name].numel)
            for name, parameter in self._named()
            if name in owned
        }

    def scalar_state(self) -> dict[str, Any]:
        """DeepSpeed's counts of steps, and its loss scaler's numbers."""
        scaler = getattr(self.module.optimizer, "loss_scaler", None)
        kept = {k: v for k, v in vars(scaler).items() if isinstance(v, bool | int | float)} if scaler else {}
        return {"engine": {name: getattr(self.module, name) for name in _COUNTS}, "loss_scaler": kept}

    def load_scalar_state(self, values: Mapping[str, Any]) -> None:
        """Sets them, and brings DeepSpeed's CPU Adam to the step of its state."""
        for name, value in values["engine"].items():
            setattr(self.module, name, value)
        for name, value in values["loss_scaler"].items():
            setattr(self.module.optimizer.loss_scaler, name, value)
        if type(self.module.basic_optimizer).__name__ == "DeepSpeedCPUAdam":
            catch_up_cpu_adam(self.module.basic_optimizer)

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Nothing belongs to one rank alone."""
        return {}

    def load_rank_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing belongs to one rank alone."""

    def parameter_hash(self) -> str | None:
        """Below stage 3 every data-parallel rank holds all parameters of its tensor-parallel rank and its stages."""
        return None if self.stage == 3 else content_hash(self._model.parameters())

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """In full, in the dtype of the forward pass."""
        return self._split.shared(dict(self._model.named_parameters()))

    def facts(self) -> EngineFacts:
        """Measures what DeepSpeed has set up, and the swap files."""
        named, nvme_bytes = dict(self._model.named_parameters()), sum(swap.bytes() for swap in self._swaps)
        return measure(self.module, named, self._split, self.mesh, nvme_bytes)

    def close(self) -> None:
        """Removes DeepSpeed's hooks and this rank's swap files."""
        if isinstance(getattr(self, "module", None), deepspeed.DeepSpeedEngine):
            self.module.destroy()
        for swap in self._swaps:
            swap.close()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Makes `torch.compile` a no-op inside.

    Under ZeRO DeepSpeed imports its Muon to compare types, and the decorators of Muon's kernels load all of inductor:
    0.8 s. No run uses those kernels, since Muon looks at full tensors.
    """
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _quieten() -> None:
    """Hides DeepSpeed's progress messages, and torch's warnings to DeepSpeed about renamed collectives."""
    deepspeed.utils.set_log_level_from_string("error")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
