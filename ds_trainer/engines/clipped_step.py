"""The end of a step on torch's own optimizers and loss scaler: clip, update, and drop what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch

from ds_trainer.config.training_sections import OptimizerConfig
from ds_trainer.engines.base import StepOutcome
from ds_trainer.engines.clip import clip_by_norm, global_norm


def clipped_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    gradients: Sequence[torch.Tensor],
    counted: Sequence[torch.Tensor],
    config: OptimizerConfig,
    over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> StepOutcome:
    """Updates the weights by the clipped gradients, unless these are not finite, and frees them.

    Args:
        optimizer: Updates them.
        scaler: Its scale is divided out first, and adapted last.
        gradients: This rank's, as plain tensors that share the memory of the parameters' `grad`.
        counted: What of them counts on this rank, where several have the same.
        config: Which norm, and its limit.
        over_ranks: Makes the norm of all ranks' gradients out of that of what counts on this rank.
    """
    scaler.unscale_(optimizer)
    norm = over_ranks(global_norm(counted, config.norm_type)).item()
    finite = isfinite(norm)
    if finite:
        clip_by_norm(gradients, config.max_grad_norm, norm)
        scaler.step(optimizer)
    elif scaler.is_enabled():
        # Where this tensor rank's gradients are finite and another's are not, their loss scales would part.
        for found in scaler._found_inf_per_device(optimizer).values():
            found.fill_(1.0)
    scaler.update()
    optimizer.zero_grad()
    return StepOutcome(norm if finite else float("inf"), skipped=not finite)
