"""What a rank tells the others about itself once a second, and what follows from what all have told. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.errors import RankFailedError
from ds_trainer.health.rank_position import Whereabouts


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
class Status:
    """What one rank tells.

    Args:
        beat: Number of this report; one that does not grow is old.
        whereabouts: Where it is.
        idle_s: For how long it has done nothing, or has waited in an agreement.
        waits: Whether its main thread stands in a collective.
        patient: Whether it may stand still.
        doing: Innermost code of the user's, with file and line.
        stack: The innermost calls, once it has been idle for a while.
    """

    beat: int
    whereabouts: Whereabouts
    idle_s: float
    waits: bool
    patient: bool
    doing: str
    stack: str = ""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_json(cls, text: str) -> Status:
        """What `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"whereabouts": Whereabouts(**fields["whereabouts"])})


@dataclass(frozen=True)
class Verdict:
    """A failure that shows only when the reports of all ranks are laid side by side.

    Args:
        error: What to say.
        stacks: What the culprits are doing.
    """

    error: RankFailedError
    stacks: str


def judge(statuses: Mapping[int, Status], timeouts: Timeouts) -> Verdict | None:
    """Finds a run that stands still for ever, or ranks that let the others wait for too long.

    A run stands still when no rank does anything: then nothing is left that could move one of them. A rank in code
    between the trainer's calls may take its time, and so may one that is patient.

    Args:
        statuses: The latest report of every rank that has not ended.
        timeouts: How long is too long.
    """
    waiting = [rank for rank, status in statuses.items() if status.waits]
    others = [rank for rank in statuses if rank not in waiting]
    still = all(s.whereabouts.guarded and not s.patient and s.idle_s >= timeouts.stuck_s for s in statuses.values())
    if still:
        return _stuck(statuses, others or waiting, waiting if others else [], timeouts.stuck_s)
    late = any(not statuses[rank].patient for rank in others) and any(
        statuses[rank].idle_s >= timeouts.collective_s for rank in waiting
    )
    return _never_came(statuses, others, waiting, timeouts.collective_s) if late else None


def _stuck(statuses: Mapping[int, Status], culprits: list[int], waiting: list[int], stuck_s: float) -> Verdict:
    kept = f"; ranks {waiting} wait at {_places(statuses, waiting)}" if waiting else ""
    subject = f"rank {culprits[0]} is" if len(culprits) == 1 else f"ranks {culprits} are"
    return _verdict(
        statuses,
        culprits,
        f"{subject} stuck, nothing computed, read or written for {stuck_s:g} s: {_where(statuses, culprits)}{kept}",
        "a run in which no rank does anything will never move again",
        "mend what it waits for; where it is right to wait for so long, raise run.stuck_timeout_s",
    )


def _never_came(statuses: Mapping[int, Status], culprits: list[int], waiting: list[int], limit_s: float) -> Verdict:
    return _verdict(
        statuses,
        culprits,
        f"ranks {waiting} have waited {limit_s:g} s at {_places(statuses, waiting)} for {_where(statuses, culprits)}",
        "ranks meet in collectives, and wait there for one another",
        "make the same calls on every rank; where one may be so late, raise run.collective_timeout_s",
    )


def _verdict(statuses: Mapping[int, Status], culprits: list[int], found: str, rule: str, change: str) -> Verdict:
    stacks = "".join(f"rank {rank}:\n{statuses[rank].stack}" for rank in culprits if statuses[rank].stack)
    return Verdict(RankFailedError(found, rule, change), stacks)


def _where(statuses: Mapping[int, Status], ranks: list[int]) -> str:
    return "; ".join(f"{statuses[rank].whereabouts.of(rank)}, in {statuses[rank].doing}" for rank in ranks)


def _places(statuses: Mapping[int, Status], ranks: list[int]) -> str:
    places = {statuses[rank].whereabouts.agreement or statuses[rank].whereabouts.place for rank in ranks}
    return " and ".join(sorted(places))
