"""Whether the checkpoints that a run will write fit on the disk, told before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import MachineError
from ds_trainer.log import get_logger
from ds_trainer.planning.memory import moment_bytes


def require_room(config: RunConfig, num_trained: int, saves: int) -> None:
    """Refuses a run whose first checkpoint would not fit, and warns of one whose later ones would not.

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
    # A new one is whole before an old one goes.
    at_once = min(saves, config.checkpoint.keep_last + 1)
    free = shutil.disk_usage(output_dir).free
    found = f"a checkpoint takes {one / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {output_dir}"
    if free < one:
        raise MachineError(
            found,
            "there must be room before the run starts, not only when it writes",
            "set run.output_dir to a larger drive, or checkpoint.every_steps to 0",
        )
    if free < one * at_once:
        text = "warning: %s, and up to %d are there at once: lower checkpoint.keep_last or free space"
        get_logger().warning(text, found, at_once)
