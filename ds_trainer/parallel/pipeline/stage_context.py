"""What the stand-ins in a model that is cut into stages know: which stage runs, and with which hidden states.

Legend: B samples, t positions of the hidden states between stages on this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_trainer.errors import ModelError


class StageDone(BaseException):
    """Ends the model's own forward where the stage that runs ends.

    Not an `Exception`: no code between the layers and the caller is to take it for a fault.

    Args:
        hidden_BtH: What the next stage's first layer would have been given.
    """

    def __init__(self, hidden_BtH: torch.Tensor) -> None:
        self.hidden_BtH = hidden_BtH
        super().__init__()


@dataclass(frozen=True)
class Running:
    """The stage that runs.

    Args:
        start: Its first layer.
        stop: The layer behind its last one.
        hidden_BtH: What came from the stage before; None: it is the first one.
    """

    start: int
    stop: int
    hidden_BtH: torch.Tensor | None


class Passage:
    """Tells the stand-ins of one model which of its stages runs.

    Attributes:
        running: The stage; None: none.
    """

    def __init__(self) -> None:
        self.running: Running | None = None

    @contextmanager
    def during(self, running: Running) -> Iterator[None]:
        """While a stage runs."""
        self.running = running
        try:
            yield
        finally:
            self.running = None

    def require(self, module: object) -> Running:
        """The stage that runs, in which a module is called that this rank does not hold.

        Raises:
            ModelError: None runs.
        """
        if self.running is None:
            raise ModelError(
                f"a {type(module).__name__} is called that this rank does not hold: another pipeline stage has it",
                "the part of a model that a pipeline's rank holds does not run alone",
                "leave the model to the trainer, or set parallel.pp to 1",
            )
        return self.running
