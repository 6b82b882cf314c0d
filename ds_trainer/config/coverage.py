"""What becomes of every key on every engine: nothing is dropped in silence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["mapped", "implied", "refused", "no_effect"]


@dataclass(frozen=True)
class Coverage:
    """What becomes of a key on an engine.

    Args:
        status: `mapped`: handed to the engine. `implied`: done by ds_trainer itself, alike on every engine. `refused`:
            an error when it asks for something. `no_effect`: runs, with a warning when it is set.
        note: One line for people.
        already: Values of a refused key that say what happens anyway.
    """

    status: Status
    note: str
    already: tuple[str, ...] = ()


_OURS = {
    "": Coverage("implied", "done by ds_trainer, alike on every engine"),
    "$schema": Coverage("implied", "read by editors"),
}

_TABLE: dict[str, dict[str, Coverage]] = {
    "deepspeed": _OURS
    | {
        "zero": Coverage("mapped", "zero_optimization and aio"),
        "precision.dtype": Coverage("mapped", "bf16, fp16; torch_autocast for bf16 at stage 0"),
        "precision.grad_dtype": Coverage("mapped", "data_types.grad_accum_dtype"),
        "precision.communication_data_type": Coverage("mapped", "communication_data_type"),
        "precision.loss_scale": Coverage("mapped", "fp16"),
        "batch": Coverage("mapped", "train_batch_size and its factors"),
        "optimizer.max_grad_norm": Coverage("mapped", "gradient_clipping"),
        "native.deepspeed": Coverage("mapped", "merged last"),
        "ddp": Coverage("refused", "arguments of DistributedDataParallel, which the deepspeed engine does not use"),
    },
    "ddp": _OURS
    | {
        "ddp": Coverage("mapped", "arguments of DistributedDataParallel and its communication hooks"),
        "precision.dtype": Coverage("mapped", "torch.autocast over fp32 parameters"),
        "precision.loss_scale": Coverage("mapped", "torch.amp.GradScaler"),
        "precision.loss_scale.hysteresis": Coverage("no_effect", "torch.amp.GradScaler halves at each overflow"),
        "precision.loss_scale.min_loss_scale": Coverage("no_effect", "torch.amp.GradScaler has no lower end"),
        "precision.grad_dtype": Coverage("refused", "DDP accumulates in the parameters' format", ("fp32",)),
        "precision.communication_data_type": Coverage(
            "refused", "on DDP gradients are compressed by ddp.comm_hook", ("fp32",)
        ),
        "zero": Coverage("refused", "ZeRO belongs to the deepspeed engine"),
        "native.deepspeed": Coverage("refused", "DeepSpeed keys belong to the deepspeed engine"),
    },
}


def covered_engines() -> tuple[str, ...]:
    """Engines that the table knows; a plug-in says itself what it takes."""
    return tuple(_TABLE)


def coverage(key: str, engine: str) -> Coverage:
    """What becomes of a dotted leaf key on an engine: the entry of its longest prefix.

    Raises:
        KeyError: The engine is not in the table.
    """
    table = _TABLE[engine]
    parts = key.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next(table[prefix] for prefix in prefixes if prefix in table)
