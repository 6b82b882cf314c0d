"""Runs a function on several ranks: real processes, one gloo group, forked from a server that has torch loaded already.

What makes a multi-process test slow is importing torch in each rank, not starting processes.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    # Ahead of all that imports the functions which it replaces.
    "tests.helpers.machine_facts",
    # DeepSpeed imports these at its first set-up, which takes seconds.
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "ds_trainer.engines.ddp",
    "ds_trainer.engines.deepspeed.engine",
    "ds_trainer.engines.fsdp2.engine",
    "ds_trainer.trainer.trainer",
    "pytest",
    "tests.helpers.parity",
    "tests.helpers.warm_up",
]


class World:
    """A fork server with torch, transformers and deepspeed loaded."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def __call__(self, function: Callable, ranks: int, *args: Any, timeout_s: float = 150.0) -> list[Any]:
        """Runs `function(*args)` on every rank.

        Args:
            function: Importable function; its result must be picklable.
            ranks: Number of ranks.
            args: Arguments, the same on every rank.
            timeout_s: After this, stacks are dumped and the test fails.

        Returns:
            The results in rank order.

        Raises:
            RankFailed: A rank raised, exited or did not end in time.
        """
        with tempfile.TemporaryDirectory() as folder:
            receivers, processes = [], []
            for rank in range(ranks):
                receiver, sender = self._context.Pipe(duplex=False)
                process = self._context.Process(
                    target=_rank, args=(function, args, rank, ranks, folder, sender, timeout_s), daemon=False
                )
                process.start()
                sender.close()
                receivers.append(receiver)
                processes.append(process)
            results = [_receive(receiver, timeout_s + 20) for receiver in receivers]
            for process in processes:
                process.join(5)
                process.kill()
        failures = [f"rank {i}: {text}" for i, (ok, text) in enumerate(results) if not ok]
        if failures:
            raise RankFailed("\n".join(failures))
        return [value for _, value in results]

    def close(self) -> None:
        """Ends the server."""
        stop = getattr(multiprocessing.forkserver._forkserver, "_stop", None)
        if stop is not None:
            stop()


class RankFailed(AssertionError):
    """A rank raised, exited, or did not end in time; the text holds every rank's traceback."""


def _receive(receiver: Any, timeout_s: float) -> tuple[bool, Any]:
    if not receiver.poll(timeout_s):
        return False, f"no result within {timeout_s:.0f} s"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return False, "ended without a result"


def _default_signals() -> None:
    """As in a terminal: a shell ignores SIGINT in background jobs, `nohup` ignores SIGHUP, and ranks inherit both."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _rank(function: Callable, args: tuple, rank: int, ranks: int, folder: str, sender: Any, timeout_s: float) -> None:
    import torch

    gc.freeze()  # A collection would otherwise walk, and so copy, all that the fork shares with the server.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    _default_signals()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(Path(folder) / "rendezvous"), ranks), rank=rank, world_size=ranks
    )
    # A rank whose function ends at once would break the connections of one that still joins.
    torch.distributed.barrier()
    try:
        result = (True, function(*args))
    except BaseException:  # noqa: BLE001  the parent re-raises it, whatever it was
        result = (False, traceback.format_exc())
    # Plain bytes: a Connection would send a tensor as a handle that dies with this process.
    sender.send_bytes(pickle.dumps(result))
    sender.close()
    sys.stdout.flush()
    os._exit(0)  # Skips destructors that would wait for ranks that have failed.
