"""Ranks that fail: real processes over a small loop on a mesh, what each of them wrote and when it ended."""

import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import free_port
from tests.helpers.world import PRELOAD


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Args:
        code: Exit code; negative: the signal that killed it.
        text: What it wrote to stderr.
        seconds: From `at` on, the moment that the failure was due, to its end.
    """

    code: int
    text: str
    seconds: float


@contextmanager
def started(function, ranks, *args, store="file"):
    """Starts `function(*args)` on ranks, and yields their processes and the folder of their `stderr<rank>`.

    With `store="file"` the group exists already; with "tcp" the ranks have to form it, and rank 0 holds the store.
    Whoever still lives at the end of the block is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port() if store == "tcp" else None
        processes = [context.Process(target=_rank, args=(function, args, r, ranks, folder, port)) for r in range(ranks)]
        for process in processes:
            process.start()
        try:
            yield processes, folder
        finally:
            for process in processes:
                process.kill()
                process.join()


def wait_for_ends(processes, timeout_s):
    """When each process ended, by its place in the list; those that did not end in time are missing."""
    deadline, ends = time.time() + timeout_s, {}
    while len(ends) < len(processes) and time.time() < deadline:
        ends |= {r: time.time() for r, p in enumerate(processes) if r not in ends and not p.is_alive()}
        time.sleep(0.02)
    return ends


def run_ranks(function, ranks, *args, store="file", timeout_s=60.0):
    """Runs `function(*args)` on ranks, as `started` does, and waits for all to end, whatever their end is."""
    with started(function, ranks, *args, store=store) as (processes, folder):
        ends = wait_for_ends(processes, timeout_s)
        for process in processes:
            process.kill()
            process.join()
        began = (folder / "due").stat().st_mtime if (folder / "due").exists() else time.time()
        texts = [(folder / f"stderr{rank}").read_text() for rank in range(ranks)]
        return [
            Ended(process.exitcode, text, ends.get(rank, time.time()) - began)
            for rank, (process, text) in enumerate(zip(processes, texts, strict=True))
        ]


def due():
    """Marks the moment from which `Ended.seconds` counts."""
    Path(os.environ["DUE"]).touch()


def _rank(function, args, rank, ranks, folder, port):
    import torch

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ["DUE"] = str(folder / "due")
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    else:
        store = torch.distributed.FileStore(str(folder / "rendezvous"), ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    function(*args)
