"""Rendezvous: ranks find one another at a key-value store that rank 0 serves; logs a wait that takes long."""

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
_QUIET_S = 10.0
_NO_ANSWER_S = 15.0
"""What accepts a connection and does not answer for so long is no store; torch itself would wait for ever."""
_ARRIVED = "arrived"


def join_store(grid: Grid, timeout: timedelta = JOIN_TIMEOUT) -> dist.Store:
    """Connects to the store at MASTER_ADDR:MASTER_PORT and waits until every rank has.

    Args:
        grid: This rank's coordinates in a world of several.
        timeout: Longest time.

    Raises:
        MachineError: The port is busy, no store listens there, or ranks are missing.
    """
    rendezvous = _Rendezvous(grid, timeout)
    try:
        # torchrun's store outlives a restart: each attempt has its own keys.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return rendezvous.wait_for_all(dist.PrefixStore(f"ds_trainer/{attempt}", rendezvous.connect()))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise rendezvous.failed(str(error).partition("\n")[0]) from error


class _Rendezvous:
    """Where ranks wait for one another, and until when."""

    def __init__(self, grid: Grid, timeout: timedelta) -> None:
        self._grid, self._timeout = grid, timeout
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._began, self._logged = time.monotonic(), False

    def connect(self) -> dist.Store:
        """Serves the store on rank 0, unless torchrun's agent does; reaches it on the others."""
        serves = self._grid.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        if serves:
            return self._store(serves)
        while (error := self._connection_error()) is not None:
            self._log_once(f"waiting for rank 0 of {self._grid.world} ranks at {self._where}")
            self._check_time(f"nobody listens there: {error}")
            self._pause()
        # In a thread, since torch waits for an answer for ever; a daemon, so that it does not block the exit.
        attempt: Future[dist.Store] = Future()
        Thread(target=self._attempt, args=(attempt,), daemon=True).start()
        deadline = time.monotonic() + _NO_ANSWER_S
        while time.monotonic() < deadline:
            self._pause()
            if attempt.done():
                return attempt.result()
        raise self.failed("something else listens there, and does not answer")

    def wait_for_all(self, store: dist.Store) -> dist.Store:
        """Waits until every rank has arrived, and returns the store."""
        world = self._grid.world
        arrived = store.add(_ARRIVED, 1)
        while arrived < world:
            self._check_time(f"only {arrived} of {world} ranks came")
            limit = self._timeout.total_seconds()
            self._log_once(f"waiting for {world - arrived} of {world} ranks at {self._where}, for up to {limit:g} s")
            self._pause()
            arrived = store.add(_ARRIVED, 0)
        return store

    def failed(self, why: str) -> MachineError:
        """The error that this rank raises."""
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

    def _connection_error(self) -> OSError | None:
        """Why no connection can be made; None where one can."""
        try:
            socket.create_connection((self._address, self._port), timeout=1.0).close()
        except OSError as error:
            return error
        return None

    def _pause(self) -> None:
        """Waits a moment; a signal ends the run, which has nothing to save before all ranks have joined."""
        if signals.pending():
            raise signals.StopRequested
        time.sleep(_POLL_S)

    def _check_time(self, found: str) -> None:
        limit = self._timeout.total_seconds()
        if time.monotonic() - self._began > limit:
            raise self.failed(f"after {limit:g} s {found}")

    def _log_once(self, text: str) -> None:
        if not self._logged and time.monotonic() - self._began > _QUIET_S:
            self._logged = True
            get_logger().info(text, extra={"all_ranks": self._grid.local_rank == 0})
