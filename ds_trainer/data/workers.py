"""Micro-batches in order, prefetched by worker processes or, without workers, made in this process.

Workers are forked explicitly, since Python 3.14 no longer forks by default. A fork inherits any data set and collator,
even lambdas and open files, and starts in milliseconds; a spawned process must unpickle them and import torch, which
takes seconds. Forking beside the threads of gloo, NCCL and DeepSpeed is dangerous only where the child touches their
objects, so workers never do: they use no collective and no GPU, run torch on one thread, and their garbage collector
ignores all objects from before the fork, or it might run the destructor of a process group whose threads are gone.
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
EXIT_DELAY_S = 1.0
"""How long after its connection breaks a worker may still take to exit."""
CLOSE_TIMEOUT_S = 5.0
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A terminal sends SIGINT to the whole foreground group, a scheduler any of them to every process of the job."""


class BatchStream:
    """Iterates over the micro-batches of `tasks`; `close` ends the workers.

    Args:
        maker: Makes a micro-batch of a task.
        tasks: Micro-batches to make, in order; iterated as far ahead as workers prefetch.
        num_workers: Worker processes; 0: this process makes the micro-batches.
        prefetch_factor: Micro-batches that each worker prefetches.
        pin_memory: Return batches in page-locked memory.
    """

    def __init__(
        self, maker: BatchMaker, tasks: Iterable[Task], num_workers: int, prefetch_factor: int, pin_memory: bool
    ) -> None:
        self._what, self._pin_memory = maker.what, pin_memory
        loader: DataLoader = DataLoader(
            cast(Any, maker),
            sampler=tasks,
            batch_size=None,
            collate_fn=_checked_pickling,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=partial(_init_worker, os.getpid()),
            multiprocessing_context="fork" if num_workers else None,
            generator=torch.Generator(),  # Else every start would draw from the default generator, which dropout uses.
        )
        others = multiprocessing.active_children()
        with _collector_paused(), _sigchld_handler_preserved():
            self._batches: Iterator[MicroBatch | FailedBatch] | None = iter(loader)
        self._workers = [child for child in multiprocessing.active_children() if child not in others]
        # Where a process ends without `close`, multiprocessing sends SIGTERM, which workers ignore, and joins them.
        self._at_exit = Finalize(None, _kill, (self._workers,), exitpriority=0)

    def __next__(self) -> MicroBatch:
        """The next micro-batch.

        Raises:
            Exception: The error of the data set, the collator or a check of the batch, in whichever process it was.
            MachineError: A worker has ended.
        """
        assert self._batches is not None
        self._check_workers()
        try:
            made = next(self._batches)
        except (RuntimeError, OSError, EOFError):  # torch looks for dead workers every 5 s, or was reading from one
            self._check_workers(EXIT_DELAY_S)
            raise
        if isinstance(made, FailedBatch):
            made.reraise()
        return _copied_from_shared_memory(made) if self._workers and not self._pin_memory else made

    def close(self) -> None:
        """Ends the workers: each after its micro-batch, or with SIGKILL after `CLOSE_TIMEOUT_S`."""
        kill = threading.Timer(CLOSE_TIMEOUT_S, self._at_exit)
        if self._workers:
            kill.start()
        self._batches = None  # Deleting torch's iterator ends its workers, and joins one after the other.
        kill.cancel()
        self._at_exit()
        for worker in self._workers:
            worker.join()

    def _check_workers(self, timeout_s: float = 0.0) -> None:
        ended = wait([worker.sentinel for worker in self._workers], timeout=timeout_s)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join()  # The sentinel is ready slightly before the exit code.
                raise _exit_error(worker, self._what)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _checked_pickling(made: Any) -> Any:
    """The batch, or an error if it cannot be pickled: the queue would lose it, and training would wait for ever."""
    if isinstance(made, FailedBatch) or get_worker_info() is None:
        return made
    try:
        pickle.dumps([value for value in made.values() if not torch.is_tensor(value)])
    except Exception as error:  # noqa: BLE001  any object may raise any error here
        return FailedBatch(
            DataError(
                f"the data collator returns an object that cannot be pickled ({error})",
                "workers send batches to the training process pickled",
                "return tensors and plain values from data_collator, or set data.num_workers to 0",
            )
        )
    return made


def _copied_from_shared_memory(batch: MicroBatch) -> MicroBatch:
    """Copies a worker's tensors, as pinning does: each one holds a file descriptor, of which a process has few."""
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}


def _init_worker(parent: int, worker_id: int) -> None:
    """Prepares a worker process, before its first micro-batch."""
    for number in IGNORED_SIGNALS:
        # Not SIG_IGN, which programs that a data set starts would inherit.
        signal.signal(number, _ignore)
    if sys.platform == "linux":
        # Torch's workers check every 5 s whether their parent lives, and keep its ports and locks until then.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    gc.freeze()
    gc.enable()


def _ignore(number: int, frame: Any) -> None:
    pass


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Forks workers with the garbage collector off; they freeze all existing objects before they turn it on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _sigchld_handler_preserved() -> Iterator[None]:
    """Removes torch's handler of SIGCHLD, which raises at any place when a worker dies, even inside a collective.

    The next micro-batch raises instead, where all ranks agree on the error.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


def _exit_error(worker: BaseProcess, what: str) -> MachineError:
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
