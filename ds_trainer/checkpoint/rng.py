"""Every random number generator of a process, as tensors and JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

_NumpyState = tuple[str, np.ndarray, int, int, float]


def rng_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The generators of Python, NumPy, torch, and this rank's GPU: tensors, and what else describes them."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(_NumpyState, np.random.get_state())
    tensors = {
        "rng.python": torch.tensor(numbers, dtype=torch.int64),
        "rng.numpy": torch.from_numpy(keys.astype(np.int64)),
        "rng.torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors, {"python": [version, gauss], "numpy": [int(position), int(has_gauss), float(cached)]}


def set_rng_state(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> None:
    """Sets what `rng_state` returned."""
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["rng.python"].tolist()), gauss))
    position, has_gauss, cached = rest["numpy"]
    np.random.set_state(("MT19937", tensors["rng.numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["rng.torch"])
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])
