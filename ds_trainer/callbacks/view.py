"""What callbacks see of a trainer and of its run, so that they need not import it."""

from __future__ import annotations

from typing import Any, Protocol

from ds_trainer.callbacks.trainer_state import TrainerControl, TrainerState
from ds_trainer.config.schema import RunConfig
from ds_trainer.data.loader import BatchLoader
from ds_trainer.distributed.process_groups import Mesh


class EngineView(Protocol):
    """What callbacks see of an engine."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The live optimizer's parameter groups."""


class RunView(Protocol):
    """What callbacks see of a run: `ds_trainer.trainer.run.Run` is one."""

    @property
    def mesh(self) -> Mesh:
        """Process groups and device."""

    @property
    def model(self) -> Any:
        """The bare module."""

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer; None: it has none."""

    @property
    def train_loader(self) -> BatchLoader | None:
        """Training data; None: the run has none."""

    @property
    def eval_loader(self) -> BatchLoader | None:
        """Evaluation data; None: the run has none."""


class TrainerView(Protocol):
    """What callbacks see of a trainer: `ds_trainer.Trainer` is one."""

    config: RunConfig
    control: TrainerControl
    lr_scheduler: Any
    state: TrainerState

    @property
    def is_world_process_zero(self) -> int:
        """Whether this is rank 0."""

    @property
    def engine(self) -> EngineView:
        """Runs the steps."""

    @property
    def run(self) -> RunView:
        """The parts of the run."""
