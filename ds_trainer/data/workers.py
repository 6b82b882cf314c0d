"""Micro-batches in order, made ahead by worker processes or, without any, when they are asked for.

Workers are forked, by name, since Python 3.14 no longer forks by default. A fork takes any data set and collator along,
lambdas and open files too, and starts in milliseconds, where a spawned process must unpickle them and import torch for
seconds. What makes forking beside gloo's, NCCL's and DeepSpeed's threads dangerous is touching their objects in the
child, so workers never do: they use no collective and no GPU, run torch on one thread, and their garbage collector
leaves alone whatever existed before the fork, or it might run the destructor of a process group whose threads are gone.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info

from ds_trainer.data.microbatch import BatchMaker, MicroBatch, Task
from ds_trainer.data.worker_error import FailedBatch
from ds_trainer.errors import DataError, MachineError

PR_SET_PDEATHSIG = 1
DYING_S = 1.0
"""How long after a broken connection a process may still be seen to end."""
GRACE_S = 5.0
NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A terminal sends the first to the whole foreground group, a scheduler all of them to every process of the job."""


class BatchStream:
    """Iterates over the micro-batches of `tasks`; `close` ends the workers.

    Args:
        maker: Makes a micro-batch of a task.
        tasks: What to make, in order; read ahead as far as workers make ahead.
        num_workers: Processes; 0: this one.
        prefetch_factor: Micro-batches that each worker makes ahead.
        pin_memory: Hand batches over in page-locked memory.
    """

    def __init__(
        self, maker: BatchMaker, tasks: Iterable[Task], num_workers: int, prefetch_factor: int, pin_memory: bool
    ) -> None:
        self._what, self._pin_memory = maker.what, pin_memory
        loader: DataLoader = DataLoader(
            cast(Any, maker),
            sampler=tasks,
            batch_size=None,
            collate_fn=_sendable,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=partial(_become_worker, os.getpid()),
            multiprocessing_context="fork" if num_workers else None,
            generator=torch.Generator(),  # Without one, every start would draw from the stream that dropout draws from.
        )
        others = multiprocessing.active_children()
        with _collector_paused(), _child_handler_kept():
            self._batches: Iterator[MicroBatch | FailedBatch] | None = iter(loader)
        self._workers = [child for child in multiprocessing.active_children() if child not in others]
        # Where a process ends without `close`, multiprocessing sends SIGTERM, which workers ignore, and waits for them.
        self._at_exit = Finalize(None, _kill, (self._workers,), exitpriority=0)

    def __next__(self) -> MicroBatch:
        """The next micro-batch.

        Raises:
            Exception: What the data set, the collator or a check of the batch raised, wherever it was made.
            MachineError: A worker has ended.
        """
        assert self._batches is not None
        self._check_workers()
        try:
            made = next(self._batches)
        except (RuntimeError, OSError, EOFError):  # torch looks for dead workers every 5 s, or was reading from one
            self._check_workers(DYING_S)
            raise
        if isinstance(made, FailedBatch):
            made.reraise()
        return _out_of_shared_memory(made) if self._workers and not self._pin_memory else made

    def close(self) -> None:
        """Ends the workers: each after its micro-batch, or by force where that takes more than `GRACE_S`."""
        force = threading.Timer(GRACE_S, self._at_exit)
        if self._workers:
            force.start()
        self._batches = None  # torch tells its workers to end when its iterator goes, and waits for one after the other
        force.cancel()
        self._at_exit()
        for worker in self._workers:
            worker.join()

    def _check_workers(self, patience_s: float = 0.0) -> None:
        ended = wait([worker.sentinel for worker in self._workers], timeout=patience_s)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()  # The sentinel tells a little before there is an exit code.
                raise _ended(worker, self._what)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _sendable(made: Any) -> Any:
    """What was made, if it can leave the worker: what cannot would be lost there, and waited for without end."""
    if isinstance(made, FailedBatch) or get_worker_info() is None:
        return made
    try:
        pickle.dumps([value for value in made.values() if not torch.is_tensor(value)])
    except Exception as error:  # noqa: BLE001  a foreign object may raise anything here
        return FailedBatch(
            DataError(
                f"the data collator returns something that cannot be pickled ({error})",
                "what a worker makes is sent to the training process pickled",
                "return tensors and plain values from data_collator, or set data.num_workers to 0",
            )
        )
    return made


def _out_of_shared_memory(batch: MicroBatch) -> MicroBatch:
    """Copies a worker's tensors, as pinning does: each holds a file descriptor, and a step of many would run out."""
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}


def _become_worker(parent: int, worker_id: int) -> None:
    """Runs in a worker before its first micro-batch."""
    for number in NOT_FOR_WORKERS:
        # Not SIG_IGN, which the programs that a data set starts would inherit.
        signal.signal(number, _leave_to_parent)
    if sys.platform == "linux":
        # Torch's workers look every 5 s whether their parent lives, and hold its ports and locks until then.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    gc.freeze()
    gc.enable()


def _leave_to_parent(number: int, frame: Any) -> None:
    pass


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Forks workers with the garbage collector off, which they turn on when all that existed before is out of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _child_handler_kept() -> Iterator[None]:
    """Undoes torch's handler of SIGCHLD, which raises wherever this rank is when a worker dies: in a collective, too.

    The next micro-batch raises instead, where ranks agree.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


def _ended(worker: BaseProcess, what: str) -> MachineError:
    assert worker.exitcode is not None
    killed = worker.exitcode < 0
    how = f"was killed by {signal.Signals(-worker.exitcode).name}" if killed else f"exited with code {worker.exitcode}"
    return MachineError(
        f"worker process {worker.pid}, which reads data.{what}, {how}",
        "workers live as long as the run; the kernel kills one when memory is short (SIGKILL) or /dev/shm is full "
        "(SIGBUS)",
        "lower data.num_workers or data.prefetch_factor, give the machine or container more memory (docker: "
        "--shm-size), or set data.num_workers to 0 to see a crash in the data set's own code",
    )
