"""How ranks find one another: at a key-value store that rank 0 serves, telling of it while it takes long."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread

import torch.distributed as dist

from ds_trainer.errors import MachineError
from ds_trainer.launch import signals
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.log import get_logger

JOIN_TIMEOUT = timedelta(minutes=5)
"""Ranks that start together load torch within minutes of one another, even from a cold network drive."""

_POLL_S = 0.02
_SILENCE_S = 10.0
_STRANGER_S = 15.0
"""Who accepts a connection and answers nothing for so long is no store; torch itself would wait without end."""
_ARRIVED = "arrived"


def join_store(grid: Grid, timeout: timedelta = JOIN_TIMEOUT) -> dist.Store:
    """Connects to the store at MASTER_ADDR:MASTER_PORT and waits until every rank has.

    Args:
        grid: This rank's place in a world of several.
        timeout: Longest time.

    Raises:
        MachineError: The port is busy, nobody or somebody else listens there, or ranks are missing.
    """
    meeting = _Meeting(grid, timeout)
    try:
        # torchrun's store outlives an attempt: each one has keys of its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return meeting.wait_for_all(dist.PrefixStore(f"ds_trainer/{attempt}", meeting.connect()))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise meeting.failed(str(error).partition("\n")[0]) from error


class _Meeting:
    """Where and until when ranks wait for one another."""

    def __init__(self, grid: Grid, timeout: timedelta) -> None:
        self._grid, self._timeout = grid, timeout
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._began, self._told = time.monotonic(), False

    def connect(self) -> dist.Store:
        """Serves the store on rank 0, unless torchrun's agent does; reaches it on the others."""
        serves = self._grid.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        if serves:
            return self._store(serves)
        while (error := self._knock()) is not None:
            self._tell(f"waiting for rank 0 of {self._grid.world} ranks at {self._where}")
            self._check_time(f"nobody listens there: {error}")
            self._pause()
        # In a thread, since torch waits without end for an answer; a daemon, so that it holds up no exit.
        attempt: Future[dist.Store] = Future()
        Thread(target=self._attempt, args=(attempt,), daemon=True).start()
        deadline = time.monotonic() + _STRANGER_S
        while time.monotonic() < deadline:
            self._pause()
            if attempt.done():
                return attempt.result()
        raise self.failed("something else listens there, and does not answer")

    def wait_for_all(self, store: dist.Store) -> dist.Store:
        """Waits until every rank has come, and returns the store."""
        world = self._grid.world
        arrived = store.add(_ARRIVED, 1)
        while arrived < world:
            self._check_time(f"only {arrived} of {world} ranks came")
            limit = self._timeout.total_seconds()
            self._tell(f"waiting for {world - arrived} of {world} ranks at {self._where}, for up to {limit:g} s")
            self._pause()
            arrived = store.add(_ARRIVED, 0)
        return store

    def failed(self, why: str) -> MachineError:
        """The error of this rank."""
        return MachineError(
            f"rank {self._grid.rank} cannot join the process group at {self._where} ({why})",
            f"rank 0 listens at MASTER_ADDR:MASTER_PORT, and all {self._grid.world} ranks must reach it",
            f"if port {self._port} is busy choose another (deepspeed --master_port N, torchrun --master_port N, "
            "accelerate launch --main_process_port N, MASTER_PORT=N for srun and mpirun); "
            "if ranks are missing start all of them with one launcher",
        )

    @property
    def _where(self) -> str:
        return f"{self._address}:{self._port}"

    def _store(self, serves: bool) -> dist.Store:
        return dist.TCPStore(
            self._address,
            self._port,
            self._grid.world,
            serves,
            self._timeout,
            wait_for_workers=False,
            multi_tenant=serves,
        )

    def _attempt(self, attempt: Future[dist.Store]) -> None:
        try:
            attempt.set_result(self._store(serves=False))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            attempt.set_exception(error)

    def _knock(self) -> OSError | None:
        """Why no connection can be made; None where one can."""
        try:
            socket.create_connection((self._address, self._port), timeout=1.0).close()
        except OSError as error:
            return error
        return None

    def _pause(self) -> None:
        """Waits a moment; a signal ends the wait for good, since ranks that have not met have nothing to save."""
        if signals.pending():
            raise signals.StopRequested
        time.sleep(_POLL_S)

    def _check_time(self, seen: str) -> None:
        limit = self._timeout.total_seconds()
        if time.monotonic() - self._began > limit:
            raise self.failed(f"after {limit:g} s {seen}")

    def _tell(self, text: str) -> None:
        if not self._told and time.monotonic() - self._began > _SILENCE_S:
            self._told = True
            get_logger().info(text, extra={"all_ranks": self._grid.local_rank == 0})
