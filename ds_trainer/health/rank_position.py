"""Where a rank is in the run, in a form that outlives it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 16


@dataclass
class Whereabouts:
    """Where a rank is.

    Args:
        place: The part of the run, such as "step 4" or "evaluate()".
        step: The step it computes or has last computed, counted from 1; None before the first.
        samples: The samples it works on, as text.
        guarded: How many of the trainer's calls it is inside of; 0 in code of the user's between them.
        agreement: The agreement it waits in; "" outside.
        stages: The stages that it has of a pipeline, as text; "" without one.
    """

    place: str = "set-up"
    step: int | None = None
    samples: str = ""
    guarded: int = 0
    agreement: str = ""
    stages: str = ""

    def of(self, rank: int) -> str:
        """The same in words: `rank 1 (stage 2 of 2), step 4, samples [3, 7]`."""
        step = "" if self.step is None else f"step {self.step}"
        place = "" if self.place == step else self.place
        who = f"rank {rank} ({self.stages})" if self.stages else f"rank {rank}"
        return ", ".join(part for part in (who, place, step, self.samples) if part)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_json(cls, text: str) -> Whereabouts:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def stage_text(stages: Sequence[int], of: int) -> str:
    """`stage 2 of 4`, `stages 1 and 3 of 4`: numbers from 0 as people count."""
    numbers = " and ".join(str(stage + 1) for stage in stages)
    return f"stage{'s' if len(stages) > 1 else ''} {numbers} of {of}"


def sample_text(samples: Sequence[int]) -> str:
    """`samples [3, 7]`; of many the first ones and their number."""
    if not samples:
        return ""
    if len(samples) <= _SHOWN:
        return f"samples {list(samples)}"
    return f"samples [{', '.join(map(str, samples[:_SHOWN]))}, ... {len(samples)} in all]"
