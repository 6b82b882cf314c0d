"""`ds-trainer train --nproc N`: starts the ranks of this machine and returns their exit code.

It does not use torchrun, which turns every exit code into 1, writes its own trace after a rank's error, and kills the
ranks 30 s after a signal, when they may still be saving a checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from ds_trainer.errors import ConfigError
from ds_trainer.launch.environment import Launch
from ds_trainer.launch.mpi import check_unknown_mpi, mpi_grid
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.launch.signals import EXIT_CODE, SIGNALS
from ds_trainer.launch.slurm import slurm_grid, started_by_srun
from ds_trainer.log import get_logger

_POLL_S = 0.1
_GRACE_S = 20.0
"""Once a rank has failed, the others notice within seconds, unless they have not joined it yet."""


def run_ranks(command: Sequence[str], nproc: int, environ: Mapping[str, str] = os.environ) -> int:
    """Runs a command on `nproc` ranks.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to every rank, which is then waited for as long as it takes: ranks
    save a checkpoint before they end.

    Args:
        command: The command line of a rank.
        nproc: Number of ranks.
        environ: Environment of the ranks, to which their coordinates are added.

    Returns:
        0, or the exit code of the first rank that failed; 128 + N where signal N killed it.

    Raises:
        ConfigError: Another launcher has started this process as one of several.
    """
    _check_outermost(environ)
    port = _free_port()
    ranks: list[subprocess.Popen] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        for number in range(nproc):
            launch = Launch(Grid(nproc, number, number, nproc), "127.0.0.1", port)
            threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}
            ranks.append(subprocess.Popen(command, env=threads | dict(environ) | launch.variables))
        return _wait(ranks)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen]) -> int:
    """Waits for all ranks; kills those that outlive a failed one, unless the run was stopped in good order."""
    code, deadline = 0, float("inf")
    while any([rank.poll() is None for rank in ranks]):
        if not code and (code := _first_failure(ranks)) not in (0, EXIT_CODE):
            deadline = time.monotonic() + _GRACE_S
            _log_signals(ranks)
        if time.monotonic() > deadline:
            left = [number for number, rank in enumerate(ranks) if rank.returncode is None]
            get_logger().error("ranks %s did not end within %.0f s after another one failed: killed", left, _GRACE_S)
            for number in left:
                ranks[number].kill()
            break
        time.sleep(_POLL_S)
    return code or _first_failure(ranks)


def _log_signals(ranks: list[subprocess.Popen]) -> None:
    """Logs which ranks a signal killed: they could not report it themselves."""
    for number, rank in enumerate(ranks):
        if (rank.returncode or 0) < 0:
            name = signal.Signals(-rank.returncode).name
            get_logger().error("rank %d was ended by %s", number, name)


def _first_failure(ranks: list[subprocess.Popen]) -> int:
    code = next((rank.returncode for rank in ranks if rank.returncode), 0)
    return 128 - code if code < 0 else code


def _check_outermost(environ: Mapping[str, str]) -> None:
    place = f"RANK={environ['RANK']}" if "RANK" in environ else None
    if place is None:
        rank, task = mpi_grid(environ), slurm_grid(environ) if started_by_srun(environ) else None
        if rank is None:
            check_unknown_mpi(environ, task)
        if task is not None and task.world > 1:
            place = f"SLURM_PROCID={task.rank} of {task.world} tasks"
        elif rank is not None and rank.world > 1:
            place = f"rank {rank.rank} of {rank.world} of an MPI"
    if place is not None:
        raise ConfigError(
            f"--nproc, and the environment has {place}",
            "--nproc starts the ranks itself, so no other launcher may have started it as one of several",
            "leave --nproc out, or the other launcher",
        )


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
