"""Refuses layouts whose gradients DeepSpeed would read back from NVMe wrongly."""

from __future__ import annotations

from typing import Any

import deepspeed

from ds_trainer.errors import EngineError


def check_gradient_offsets(optimizer: Any) -> None:
    """Checks that every gradient that goes to NVMe begins on a block of its sub-group's buffer.

    The sub-group's gradients are read from their files straight into one buffer, past the page cache. Such a read fails
    where it begins between two blocks. DeepSpeed 0.19 does not notice, and updates the weights with what the buffer
    held before.

    Args:
        optimizer: DeepSpeed's stage-3 optimizer, whose states are on NVMe.

    Raises:
        EngineError: One begins between two blocks.
    """
    swapper = optimizer.optimizer_swapper
    for index, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for parameter in group:
            numel = parameter.partition_numel()
            if offset % swapper.numel_alignment and swapper.is_swappable_tensor(numel=numel):
                raise EngineError(
                    f"sub-group {index} has {len(group)} parameters, and the gradient of one of {numel} elements per "
                    f"rank begins at element {offset} of its buffer",
                    f"a gradient on NVMe begins at a multiple of {swapper.numel_alignment} elements: DeepSpeed "
                    f"{deepspeed.__version__} silently computes with wrong ones otherwise",
                    "set zero.sub_group_size to 1, which gives every parameter a buffer of its own",
                )
            offset += numel
