"""Whether the checkpoints that a run will write fit on the disk, checked before the first step."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import MachineError
from ds_trainer.host.free_space import space_fault
from ds_trainer.log import get_logger
from ds_trainer.planning.memory import moment_bytes


def require_checkpoint_space(config: RunConfig, num_trained: int, saves: int) -> None:
    """Refuses a run whose first checkpoint would not fit; warns if later ones would not.

    Args:
        config: The run's config.
        num_trained: Parameters that are trained, over all ranks.
        saves: Checkpoints that are due in the rest of the run.

    Raises:
        MachineError: Not even one fits.
    """
    if saves == 0:
        return
    optimizer, output_dir = config.optimizer, Path(config.run.output_dir)
    one = num_trained * (4 + moment_bytes(optimizer.name, optimizer.momentum > 0))
    # A new checkpoint is complete before an old one is removed.
    at_once = min(saves, config.checkpoint.keep_last + 1)
    if fault := space_fault(output_dir, one):
        raise MachineError(
            f"a checkpoint {fault}",
            "there must be free space before the run starts, not only when it writes",
            "set run.output_dir to a larger drive, or checkpoint.every_steps to 0",
        )
    if fault := space_fault(output_dir, one * at_once):
        text = "warning: up to %d checkpoints are there at once: %s; lower checkpoint.keep_last or free space"
        get_logger().warning(text, at_once, fault)
