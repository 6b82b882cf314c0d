"""What a rank reports of itself: where it is in the run, and whether it does anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 16


@dataclass
class RankPosition:
    """Where a rank is in the run.

    Args:
        place: The part of the run, such as "step 4" or "evaluate()".
        step: The step it computes or has last computed, counted from 1; None before the first.
        samples: The samples it works on, as text.
        guard_depth: How many of the trainer's calls it is inside of; 0 in the user's code between them.
        waiting_at: The place at which it waits for the consensus of all ranks; "" elsewhere.
        stages: Its pipeline stages, as text; "" without a pipeline.
    """

    place: str = "set-up"
    step: int | None = None
    samples: str = ""
    guard_depth: int = 0
    waiting_at: str = ""
    stages: str = ""

    def of(self, rank: int) -> str:
        """The position as text: `rank 1 (stage 2 of 2), step 4, samples [3, 7]`."""
        step = "" if self.step is None else f"step {self.step}"
        place = "" if self.place == step else self.place
        who = f"rank {rank} ({self.stages})" if self.stages else f"rank {rank}"
        return ", ".join(part for part in (who, place, step, self.samples) if part)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_json(cls, text: str) -> RankPosition:
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Status:
    """One rank's report, about once a second.

    Args:
        beat: Number of this report; a report whose number does not grow is old.
        position: Where the rank is.
        idle_s: For how long it has done nothing, or has waited for the consensus of all ranks.
        waits: Whether its main thread is inside a collective.
        expected_wait: Whether it is right to stand still.
        doing: Innermost code of the user's, with file and line.
        stack: The innermost calls, once it has been idle for a while.
    """

    beat: int
    position: RankPosition
    idle_s: float
    waits: bool
    expected_wait: bool
    doing: str
    stack: str = ""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_json(cls, text: str) -> Status:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"position": RankPosition(**fields["position"])})


def stage_text(stages: Sequence[int], of: int) -> str:
    """`stage 2 of 4`, `stages 1 and 3 of 4`: stage numbers that start at 0, shown from 1."""
    numbers = " and ".join(str(stage + 1) for stage in stages)
    return f"stage{'s' if len(stages) > 1 else ''} {numbers} of {of}"


def sample_text(samples: Sequence[int]) -> str:
    """`samples [3, 7]`; of many, the first ones and their number."""
    if not samples:
        return ""
    if len(samples) <= _SHOWN:
        return f"samples {list(samples)}"
    return f"samples [{', '.join(map(str, samples[:_SHOWN]))}, ... {len(samples)} in all]"
