"""A rank's position in a page of memory, which other processes of this machine can read even after kill -9."""

from __future__ import annotations

import os

from ds_trainer.health.status import RankPosition

_PAGE = 4096
"""A record that one call writes within one page is complete or absent, whenever the writer is killed."""


class SharedStatus:
    """The page, written by its owner. It is in no folder: the kernel frees it with its last user."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ds_trainer_status")

    def write(self, position: RankPosition) -> None:
        """Replaces the record, within microseconds."""
        os.pwrite(self.fd, position.to_json().encode().ljust(_PAGE)[:_PAGE], 0)


class SharedStatusReader:
    """The same page, opened by another process while its owner lives.

    Args:
        pid: The owner.
        fd: Its `SharedStatus.fd`.

    Raises:
        OSError: The owner has ended, or this process may not open its files.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)

    def read(self) -> RankPosition:
        """The last record."""
        return RankPosition.from_json(os.pread(self._fd, _PAGE, 0).decode())

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._fd)
