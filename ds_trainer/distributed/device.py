"""What the devices of this machine can do, according to torch."""

from __future__ import annotations

from typing import Literal

import torch

from ds_trainer.config.machine import probe_machine_pure
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import MachineError


def probe_machine(world: int, device: Literal["cpu", "cuda"] | None = None) -> Machine:
    """The properties of this machine that a config's derived values depend on.

    Args:
        world: Number of ranks.
        device: Device kind that the config sets; None: cuda where there is a GPU.

    Raises:
        MachineError: The config sets cuda, and torch sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        build = "is built without CUDA" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        error = MachineError(
            f"run.device is cuda, and torch sees no GPU (torch {torch.__version__} {build})",
            "cuda needs a GPU, its driver, and a torch that is built for CUDA",
            "set run.device to cpu or leave it out, or fix the driver (nvidia-smi shows whether it works)",
        )
        error.on_all_ranks = True  # Every rank of the node sees the same.
        raise error
    if device == "cpu" or not torch.cuda.is_available():
        return probe_machine_pure(world, "cpu")
    major, minor = torch.cuda.get_device_capability()
    dtypes = ["fp32", "fp16"] if (major, minor) >= (5, 3) else ["fp32"]
    # Emulated bf16 exists on older GPUs and is slower than fp32 there.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes.append("bf16")
    name = f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    return Machine(world, "cuda", tuple(dtypes), f"{name} computes {', '.join(dtypes)} natively")
