"""The run's output folder while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ds_trainer.checkpoint.folder import remove_unfinished_saves
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.run_folder import claimed, set_aside_earlier_run
from ds_trainer.trainer.run import Run


class OutputFolder:
    """Locks the output folder on rank 0 for the time of a training. Every rank has one.

    Args:
        run: The run.

    Attributes:
        is_locked: Whether the training runs, so that evaluations are written to the folder.
        has_trained: Whether a training has ended without an error.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_locked = self.has_trained = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder, removes what an interrupted save has left, and sets an earlier run's metrics aside.

        Comm: two consensus of all ranks.

        Raises:
            MachineError: On every rank: another run has locked the folder.
        """
        run = self._run
        with ExitStack() as stack:
            agree(run.mesh, "train()")
            with consensus(run.mesh, "the output folder"):
                if run.mesh.grid.rank == 0:
                    path = Path(run.resolved.config.run.output_dir)
                    stack.enter_context(claimed(path))
                    remove_unfinished_saves(path)
                    if run.checkpoint is None:
                        set_aside_earlier_run(path)
            self.is_locked = True
            try:
                yield
                self.has_trained = True
            finally:
                self.is_locked = False
