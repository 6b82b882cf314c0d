"""A rank's last words: a page of memory that other processes of this machine can read after its death, kill -9 too."""

from __future__ import annotations

import os

from ds_trainer.health.rank_position import Whereabouts

_PAGE = 4096
"""Written by one call and inside one page, a record is whole or not there, whenever the writer is killed."""


class BlackBox:
    """The page, written by its owner. It lives in no folder: the kernel frees it with its last user."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ds_trainer_black_box")

    def write(self, whereabouts: Whereabouts) -> None:
        """Replaces the record; a matter of microseconds."""
        os.pwrite(self.fd, whereabouts.to_json().encode().ljust(_PAGE)[:_PAGE], 0)


class BlackBoxReader:
    """The same page, opened by another process while its owner lives.

    Args:
        pid: The owner.
        fd: Its `BlackBox.fd`.

    Raises:
        OSError: The owner is gone, or this process may not look into it.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)

    def read(self) -> Whereabouts:
        """The last record."""
        return Whereabouts.from_json(os.pread(self._fd, _PAGE, 0).decode())

    def close(self) -> None:
        """Closes it."""
        os.close(self._fd)
