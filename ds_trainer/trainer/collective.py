"""Calls of the trainer that every rank must make."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ds_trainer.trainer.run import Run


class HasRun(Protocol):
    """An object that was set up for a run."""

    run: Run


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=HasRun)


def collective(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method a call of all ranks: the monitor watches it, and an exception on one rank ends it on all."""

    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.run.mesh.monitor.guard():
            return method(self, *args, **kwargs)

    return call
