"""What several files of real ranks begin from, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.parity import write_bf16_reference, write_reference
from tests.helpers.resume import write_checkpoint


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Callable[..., Path]:
    """`references(optimizer, shape)`: the folder of one process's run, which is trained when it is first asked for."""
    made: dict[tuple, Path] = {}

    def reference(optimizer: str, shape: dict, lr: float | None = None, precision: str = "fp32") -> Path:
        key = (optimizer, lr, precision, *sorted(shape.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(optimizer)
            torch.set_num_threads(2)
            if precision == "fp32":
                write_reference(made[key], optimizer, lr, **shape)
            else:
                write_bf16_reference(made[key], optimizer, precision == "autocast", lr, **shape)
        return made[key]

    return reference


@pytest.fixture(scope="session")
def resume_checkpoint(tmp_path_factory) -> Path:
    """The checkpoint that runs of tests/helpers/resume.py begin from."""
    return write_checkpoint(tmp_path_factory.mktemp("model"))
