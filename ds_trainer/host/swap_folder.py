"""Swap folders on an NVMe drive: one per run and rank, removed at the run's end or, after a kill, at the next start.

DeepSpeed puts `zero_stage_3/optimizer/rank<r>` and `zero_stage_3/<dtype>params/rank<r>` below the path it is given, and
removes neither: two jobs on one path would read each other's files, and a drive would fill up run by run.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ds_trainer.errors import MachineError
from ds_trainer.log import get_logger
from ds_trainer.processes import has_ended

_PREFIX = "ds_trainer-"
_OWNER = "owner.json"


@dataclass(frozen=True)
class Owner:
    """The process that a swap folder belongs to.

    Args:
        host: Name of its machine.
        pid: Its process number there.
        started: When it started, in seconds since the epoch: another process may get its number later.
    """

    host: str
    pid: int
    started: float

    @classmethod
    def this_process(cls) -> Owner:
        """This process as an owner."""
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to have ended; False for a process of another machine."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) > 1.0 or has_ended(process)
        except psutil.NoSuchProcess:
            return True


class SwapFolder:
    """The folder `<nvme_path>/ds_trainer-<run id>/rank<r>` of one rank, and its removal.

    Folders that dead processes of this machine left are removed first.

    Args:
        nvme_path: Folder on the drive; made if missing.
        run_id: Name of the run, the same on all its ranks; no other live run has it.
        rank: Global rank.

    Raises:
        MachineError: A live process owns the folder already.
    """

    def __init__(self, nvme_path: str | os.PathLike, run_id: str, rank: int) -> None:
        root = Path(nvme_path)
        remove_stale_swap_folders(root)
        self.path = root / f"{_PREFIX}{run_id}" / f"rank{rank}"
        """The `nvme_path` that DeepSpeed gets."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise MachineError(
                f"{self.path} exists already",
                "each rank of each run has its own swap folder",
                f"wait for the run that owns it to end, or remove it if that run has ended: rm -r {self.path}",
            ) from None
        (self.path / _OWNER).write_text(json.dumps(asdict(Owner.this_process())))
        self._pid = os.getpid()
        atexit.register(self.close)

    def bytes(self) -> int:
        """Bytes in the swap files."""
        return sum(file.stat().st_size for file in self.path.rglob("*.swp"))

    def close(self) -> None:
        """Removes the folder; may be called twice, and does nothing in a forked child."""
        if os.getpid() == self._pid:
            atexit.unregister(self.close)
            _remove(self.path)


def remove_stale_swap_folders(nvme_path: Path) -> None:
    """Removes the swap folders of dead processes below `nvme_path`, and logs it."""
    for folder, owner in _owned_folders(nvme_path):
        if owner.is_dead:
            _remove(folder)
            get_logger().info("removed %s, left by process %d, which has ended", folder, owner.pid)


def _owned_folders(nvme_path: Path) -> Iterator[tuple[Path, Owner]]:
    """Every rank's swap folder below `nvme_path` that names its owner."""
    for file in sorted(nvme_path.glob(f"{_PREFIX}*/rank*/{_OWNER}")):
        try:
            yield file.parent, Owner(**json.loads(file.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            continue  # Another rank is removing it, or its owner is writing it right now.


def _remove(folder: Path) -> None:
    """Removes a rank's folder, and the run's when it was the last one in it."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        return  # Other ranks of that run still have theirs.
