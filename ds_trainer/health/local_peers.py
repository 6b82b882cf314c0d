"""Which of the other ranks on this machine have ended; the kernel reports it the moment it happens."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_trainer.health.shared_status import SharedStatusReader
from ds_trainer.health.status import RankPosition
from ds_trainer.processes import has_ended


@dataclass(frozen=True)
class PeerAddress:
    """How a rank's process is found.

    Args:
        machine: Names the running kernel and its process numbers; equal where processes see one another.
        pid: Number of the process.
        status_fd: File descriptor of its `SharedStatus`.
    """

    machine: str
    pid: int
    status_fd: int

    @classmethod
    def of_this_process(cls, status_fd: int) -> PeerAddress:
        """The address of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid(), status_fd)


class LocalPeers:
    """The other ranks on this machine.

    Args:
        addresses: Address of every rank, in rank order.
        rank: This rank.
    """

    def __init__(self, addresses: list[PeerAddress], rank: int) -> None:
        self.ended: dict[int, RankPosition | None] = {}
        """Ranks that have ended, and where they were then; None where it cannot be read."""
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        self._by_fd: dict[int, int] = {}
        self._by_psutil: dict[int, psutil.Process] = {}
        self._statuses: dict[int, SharedStatusReader] = {}
        here = addresses[rank].machine
        self.local = {r for r, known in enumerate(addresses) if known.machine == here and r != rank}
        """The other ranks on this machine."""
        for peer in sorted(self.local):
            self._open(peer, addresses[peer])

    def _open(self, rank: int, address: PeerAddress) -> None:
        try:
            self._watch(rank, address.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            self.ended[rank] = None
            return
        try:
            self._statuses[rank] = SharedStatusReader(address.pid, address.status_fd)
        except OSError:
            return  # Its position in `ended` will be None.

    def _watch(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:  # Old kernels do not know the call, and some containers forbid it.
            self._by_psutil[rank] = psutil.Process(pid)
        else:
            self._by_fd[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Waits until a peer ends, `wake` is called, or the time is over; then `ended` is up to date."""
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._wake_read:
                os.read(fd, 4096)
            else:
                self._poll.unregister(fd)
                os.close(fd)
                self._mark_ended(self._by_fd.pop(fd))
        for rank, process in list(self._by_psutil.items()):
            if has_ended(process):
                del self._by_psutil[rank]
                self._mark_ended(rank)

    def wake(self) -> None:
        """Makes `wait` return, from another thread."""
        os.write(self._wake_write, b"!")

    def _mark_ended(self, rank: int) -> None:
        status = self._statuses.pop(rank, None)
        self.ended[rank] = status.read() if status is not None else None
        if status is not None:
            status.close()

    def close(self) -> None:
        """Closes every descriptor."""
        for fd in (self._wake_read, self._wake_write, *self._by_fd):
            os.close(fd)
        for status in self._statuses.values():
            status.close()
