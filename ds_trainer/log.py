"""A logger that writes on rank 0 only; it reads its rank from the launcher's variables."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

_seen: set[str] = set()


def rank() -> int:
    """Global rank of this process as the launcher states it; 0 for a plain process."""
    return _first_of("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def local_rank() -> int:
    """This process's number on its node as the launcher states it; 0 for a plain process."""
    return _first_of("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _first_of(*names: str) -> int:
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


class _RankFilter(logging.Filter):
    """Passes all records of rank 0, and those of other ranks from ERROR up."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this rank writes this record."""
        return rank() == 0 or record.levelno >= logging.ERROR or getattr(record, "all_ranks", False)


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which notebooks and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The current standard error."""
        return sys.stderr


def get_logger(name: str = "ds_trainer") -> logging.Logger:
    """The package's logger: rank 0 only, one line per message, on stderr.

    A record sent with ``extra={"all_ranks": True}`` is written by every rank.
    """
    logger = logging.getLogger(name)
    root = logging.getLogger("ds_trainer")
    if not root.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("[ds_trainer] %(message)s"))
        handler.addFilter(_RankFilter())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logger


def warn_once(message: str) -> None:
    """Logs a warning, each text once per run."""
    if message not in _seen:
        _seen.add(message)
        get_logger().warning("warning: %s", message)
