"""Finds a run that hangs, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.errors import RankFailedError
from ds_trainer.health.status import Status


@dataclass(frozen=True)
class Timeouts:
    """How long is too long.

    Args:
        stuck_s: `run.stuck_timeout_s`.
        collective_s: `run.collective_timeout_s`.
    """

    stuck_s: float = 20.0
    collective_s: float = 1800.0


DEFAULTS = Timeouts()


@dataclass(frozen=True)
class Hang:
    """A failure that shows only in the comparison of all ranks' reports.

    Args:
        error: What to report.
        stacks: What the ranks that cause it are doing.
    """

    error: RankFailedError
    stacks: str


def find_hang(statuses: Mapping[int, Status], timeouts: Timeouts) -> Hang | None:
    """Finds a run that will never move again, or ranks that keep the others waiting for too long.

    A run in which no rank does anything will never move again: nothing is left that could move one of them. A rank in
    the user's code between the trainer's calls may take any time, and so may a rank whose wait is expected.

    Args:
        statuses: The latest report of every rank that has not ended.
        timeouts: How long is too long.
    """
    waiting = [rank for rank, status in statuses.items() if status.waits]
    others = [rank for rank in statuses if rank not in waiting]
    still = all(
        s.position.guard_depth and not s.expected_wait and s.idle_s >= timeouts.stuck_s for s in statuses.values()
    )
    if still:
        return _stuck(statuses, others or waiting, waiting if others else [], timeouts.stuck_s)
    late = any(not statuses[rank].expected_wait for rank in others) and any(
        statuses[rank].idle_s >= timeouts.collective_s for rank in waiting
    )
    return _never_came(statuses, others, waiting, timeouts.collective_s) if late else None


def _stuck(statuses: Mapping[int, Status], culprits: list[int], waiting: list[int], stuck_s: float) -> Hang:
    kept = f"; ranks {waiting} wait at {_places(statuses, waiting)}" if waiting else ""
    subject = f"rank {culprits[0]} is" if len(culprits) == 1 else f"ranks {culprits} are"
    return _hang(
        statuses,
        culprits,
        f"{subject} stuck, nothing computed, read or written for {stuck_s:g} s: {_where(statuses, culprits)}{kept}",
        "a run in which no rank does anything will never move again",
        "fix what it waits for; where so long a wait is right, raise run.stuck_timeout_s",
    )


def _never_came(statuses: Mapping[int, Status], culprits: list[int], waiting: list[int], limit_s: float) -> Hang:
    return _hang(
        statuses,
        culprits,
        f"ranks {waiting} have waited {limit_s:g} s at {_places(statuses, waiting)} for {_where(statuses, culprits)}",
        "in a collective, all ranks wait for one another",
        "make the same calls on every rank; where one may be so late, raise run.collective_timeout_s",
    )


def _hang(statuses: Mapping[int, Status], culprits: list[int], found: str, rule: str, change: str) -> Hang:
    stacks = "".join(f"rank {rank}:\n{statuses[rank].stack}" for rank in culprits if statuses[rank].stack)
    return Hang(RankFailedError(found, rule, change), stacks)


def _where(statuses: Mapping[int, Status], ranks: list[int]) -> str:
    return "; ".join(f"{statuses[rank].position.of(rank)}, in {statuses[rank].doing}" for rank in ranks)


def _places(statuses: Mapping[int, Status], ranks: list[int]) -> str:
    places = {statuses[rank].position.waiting_at or statuses[rank].position.place for rank in ranks}
    return " and ".join(sorted(places))
