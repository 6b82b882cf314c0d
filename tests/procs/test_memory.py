"""What a rank keeps after the backward pass and after the step, measured on live tensors, equals the printed table."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.callbacks import Callback
from ds_trainer.engines.measure import storage_bytes
from ds_trainer.planner.needs import row_of
from tests.helpers.runs import make_trainer
from tests.helpers.tiny import samples, tiny_llama

SHAPE = {"hidden": 256, "layers": 2, "vocab": 2051, "intermediate": 1024}
# The table leaves buffers out: here they are as small as DeepSpeed takes them.
SHARDED = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
PARTITIONED = {
    "reduce_bucket_size": 1000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}
HOST = {"device": "cpu"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "zero0": ("zero0", {}),
    "zero1": ("zero1", SHARDED),
    "zero2": ("zero2", SHARDED),
    "zero3": ("zero3", PARTITIONED),
    "zero1-cpu": ("zero1", SHARDED | {"offload_optimizer": HOST}),
    "zero2-cpu": ("zero2", SHARDED | {"offload_optimizer": HOST}),
    "zero3-cpu": ("zero3", PARTITIONED | {"offload_optimizer": HOST}),
    "zero3-cpu-params": ("zero3", PARTITIONED | {"offload_optimizer": HOST, "offload_param": HOST}),
}
ON_FP32_PARAMETERS = ("ddp", "zero0")
"""Layouts that run bf16 under autocast, and so have no bf16 gradients to keep."""


class Reading(Callback):
    """Bytes per parameter of all live tensors in the last step, when optimizer states exist."""

    after_backward = after_step = 0.0

    def on_pre_optimizer_step(self, trainer: Any) -> None:
        """All gradients are there."""
        self.after_backward = live_bytes() / num_parameters(trainer)

    def on_step_end(self, trainer: Any) -> None:
        """Gradients are freed, or kept in lasting buffers."""
        self.after_step = live_bytes() / num_parameters(trainer)


def live_bytes() -> int:
    """Bytes of the distinct storages behind all tensors of this process, whoever holds them, and their gradients."""
    gc.collect()
    # type(): isinstance would wake lazily imported modules.
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.device.type != "meta"]
    return storage_bytes([*found, *(t.grad for t in found if t.is_leaf and t.grad is not None)])


def num_parameters(trainer: Any) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in trainer.run.model.parameters())


def measure(out: Path, precision: dict, layouts: list[str], accumulation: int) -> dict[str, tuple[float, ...]]:
    """Measured and expected bytes per parameter of each layout, one after the other in this process."""
    found = {}
    for layout in layouts:
        engine, zero = LAYOUTS[layout]
        before, reading = live_bytes(), Reading()
        trainer = make_trainer(
            engine,
            out,
            model=tiny_llama(**SHAPE),
            rows=samples(8 * accumulation, vocab=SHAPE["vocab"], lengths=(6, 8)),
            given={"callbacks": [reading]},
            batch={"global_size": 4 * accumulation, "micro_size": 2},
            optimizer={"name": "adamw", "lr": 1e-4},
            precision=precision,
            run={"max_steps": 2},
            **({"zero": zero} if zero else {}),
        )
        trainer.train()
        row = row_of(trainer.run.resolved)
        found[layout] = (reading.after_backward, row.after_backward, reading.after_step, row.after_step)
        left = num_parameters(trainer)
        trainer.close()
        del trainer, reading
        print(layout, found[layout], "left", (live_bytes() - before) / left, flush=True)
    return found


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "accumulation"),
    [("fp32", "fp32", 1), ("fp32", "fp32", 2), ("bf16", "fp32", 1), ("bf16", "bf16", 1)],
)
def test_live_tensors_equal_the_table_within_three_percent(world, tmp_path, dtype, grad_dtype, accumulation):
    layouts = [name for name in LAYOUTS if grad_dtype == "fp32" or name not in ON_FP32_PARAMETERS]
    precision = {"dtype": dtype, "grad_dtype": grad_dtype}
    for cells in world(measure, 2, tmp_path, precision, layouts, accumulation):
        for layout, (backward, expected_backward, step, expected_step) in cells.items():
            assert backward == pytest.approx(expected_backward, rel=0.03), f"{layout} after the backward pass"
            assert step == pytest.approx(expected_step, rel=0.03), f"{layout} after the step"
