"""Which of the other ranks on this machine have ended, told by the kernel the moment it happens."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_trainer.health.rank_position import Whereabouts
from ds_trainer.health.shared_status import BlackBoxReader
from ds_trainer.processes import has_ended


@dataclass(frozen=True)
class Introduction:
    """How a rank's process is found.

    Args:
        machine: Names the running kernel and its process numbers; equal where processes see one another.
        pid: Number of the process.
        box: File descriptor of its black box.
    """

    machine: str
    pid: int
    box: int

    @classmethod
    def of_this_process(cls, box: int) -> Introduction:
        """This process's."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid(), box)


class Peers:
    """The other ranks on this machine.

    Args:
        introductions: Every rank's, in rank order.
        rank: This rank.
    """

    def __init__(self, introductions: list[Introduction], rank: int) -> None:
        self.gone: dict[int, Whereabouts | None] = {}
        """Ranks that have ended, and where they were then; None where it cannot be read."""
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        self._by_fd: dict[int, int] = {}
        self._by_psutil: dict[int, psutil.Process] = {}
        self._boxes: dict[int, BlackBoxReader] = {}
        here = introductions[rank].machine
        self.local = {r for r, known in enumerate(introductions) if known.machine == here and r != rank}
        """The other ranks on this machine."""
        for peer in sorted(self.local):
            self._open(peer, introductions[peer])

    def _open(self, rank: int, introduction: Introduction) -> None:
        try:
            self._watch(rank, introduction.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            self.gone[rank] = None
            return
        try:
            self._boxes[rank] = BlackBoxReader(introduction.pid, introduction.box)
        except OSError:
            return  # `gone` then says None.

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
        """Waits until a peer ends, `wake` is called, or the time is over; then `gone` is up to date."""
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._wake_read:
                os.read(fd, 4096)
            else:
                self._poll.unregister(fd)
                os.close(fd)
                self._mark(self._by_fd.pop(fd))
        for rank, process in list(self._by_psutil.items()):
            if has_ended(process):
                del self._by_psutil[rank]
                self._mark(rank)

    def wake(self) -> None:
        """Makes `wait` return, from another thread."""
        os.write(self._wake_write, b"!")

    def _mark(self, rank: int) -> None:
        box = self._boxes.pop(rank, None)
        self.gone[rank] = box.read() if box is not None else None
        if box is not None:
            box.close()

    def close(self) -> None:
        """Closes every descriptor."""
        for fd in (self._wake_read, self._wake_write, *self._by_fd):
            os.close(fd)
        for box in self._boxes.values():
            box.close()
