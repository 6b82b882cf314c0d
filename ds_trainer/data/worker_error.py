"""Carries an error from a worker process to the training process, which raises the same error."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class WorkerTraceback(Exception):
    """Traceback of an error in a worker; the cause of the error that the training process raises."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


class FailedBatch:
    """Takes the place of a micro-batch that could not be made.

    Args:
        error: What was raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def reraise(self) -> NoReturn:
        """Raises the error with its traceback, or with the worker's as its cause."""
        raise self.error

    def __reduce__(self) -> tuple:
        text = "".join(traceback.format_exception(self.error))
        notes = getattr(self.error, "__notes__", [])
        return _unpickled, (_pickled(self.error), notes, text)


def _unpickled(pickled: bytes, notes: list[str], text: str) -> FailedBatch:
    error = pickle.loads(pickled)
    error.__notes__ = notes
    error.__cause__ = WorkerTraceback(text)
    return FailedBatch(error)


def _pickled(error: Exception) -> bytes:
    """The error pickled; a `RuntimeError` with its name and text where its class cannot be pickled and unpickled."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001  any class may raise any error here, which must not hide the first one
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled


@contextmanager
def error_note(note: str) -> Iterator[None]:
    """Adds a note to any error of the block."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise
