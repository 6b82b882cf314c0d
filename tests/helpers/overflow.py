"""Steps under a loss scale, some of whose gradients a test makes infinite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_trainer.engines.torch_engine import TorchEngine
from tests.helpers.runs import largest_difference, weights


def three_steps(trainer: Any, spoil: Callable[[], None]) -> tuple[list[float], list[bool]]:
    """Takes three steps, on torch's engines with a loss scale of 1024 at first, and calls `spoil` ahead of each update.

    Returns:
        Their loss scale after each step, and whether the step left all weights as they were.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    if isinstance(trainer.engine, TorchEngine):
        trainer.engine._scaler = scaler  # The config allows fp16 on GPUs only.
    scales, kept = [], []
    optimizer_step = trainer.engine.optimizer_step

    def spoiled_step() -> Any:
        spoil()
        before = weights(trainer)
        outcome = optimizer_step()
        kept.append(largest_difference(weights(trainer), before) == 0.0)
        return outcome

    trainer.engine.optimizer_step = spoiled_step
    for _ in range(3):
        trainer.train_step()
        scales.append(scaler.get_scale())
    return scales, kept
