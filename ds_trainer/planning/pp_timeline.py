"""When each pass of a schedule runs if passes take given times: idle fractions, and micro-batches held. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ds_trainer.planning.pp_schedules import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """A pass and the time it takes."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """The passes of one step in time.

    Args:
        schedule: What runs.
        spans: Of each rank, in order.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """When the last pass ends."""
        return max(row[-1].end for row in self.spans)

    @property
    def idle_of_ranks(self) -> tuple[float, ...]:
        """The fraction of the step in which each rank has nothing to do."""
        return tuple(1 - sum(span.end - span.start for span in row) / self.length for row in self.spans)

    @property
    def idle(self) -> float:
        """The same over all ranks: the bubble."""
        return sum(self.idle_of_ranks) / len(self.spans)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """On each rank the most stages' activations held at once: of a micro-batch one for each stage of the rank."""
        return tuple(max(accumulate(_held(row))) for row in self.schedule.actions)

    @property
    def peak_microbatches(self) -> tuple[float, ...]:
        """The same in activations of a micro-batch in all stages of the rank: for comparing schedules."""
        return tuple(peak / self.schedule.virtual_stages for peak in self.peak_in_flight)


def _held(actions: Sequence[Action]) -> Iterator[int]:
    """What each pass adds to the activations held; the gradient of a stage's input frees none."""
    for action in actions:
        yield {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.WEIGHT: -1, Kind.BACKWARD: -1}[action.kind]


def simulate(
    schedule: Schedule,
    forward: float = 1.0,
    input: float = 1.0,
    weight: float = 1.0,
    stage_costs: Sequence[float] | None = None,
) -> Timeline:
    """Simulates a schedule: each pass starts once its rank is free and its hidden states or gradient are there.

    Args:
        schedule: What to run.
        forward: Time of a forward pass.
        input: Time of a backward pass for the gradient of the input.
        weight: Time of one for those of parameters; a full backward pass takes both times.
        stage_costs: What to multiply the times by for each stage; None: all stages are alike. Sending takes no time.

    Raises:
        ValueError: A pass waits for one that waits for it.
    """
    times = {Kind.FORWARD: forward, Kind.BACKWARD: input + weight, Kind.INPUT: input, Kind.WEIGHT: weight}
    costs = stage_costs or (1,) * schedule.num_stages
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[_Result, float] = {}
    waiting: dict[_Result, int] = {}
    free = list(range(schedule.num_ranks))
    while free:
        rank = free.pop()
        row, actions = spans[rank], schedule.actions[rank]
        while len(row) < len(actions):
            action = actions[len(row)]
            needed = (schedule.source_of(action), action.kind is Kind.FORWARD, action.microbatch)
            if needed[0] is not None and needed not in ends:
                waiting[needed] = rank
                break
            start = max(row[-1].end if row else 0.0, ends.get(needed, 0.0))
            row.append(Span(start, start + times[action.kind] * costs[action.stage], action))
            if action.kind is not Kind.WEIGHT:
                result = (action.stage, action.kind is Kind.FORWARD, action.microbatch)
                ends[result] = row[-1].end
                if result in waiting:
                    free.append(waiting.pop(result))
    if waiting:
        stuck = ", ".join(f"rank {r} before {schedule.actions[r][len(spans[r])]}" for r in sorted(waiting.values()))
        raise ValueError(f"{schedule.name} does not end: {stuck}")
    return Timeline(schedule, tuple(map(tuple, spans)))


_Result = tuple[int | None, bool, int]
"""What a pass gives to another stage: its own stage, whether it went forward, and the micro-batch."""
