"""The order in which each rank of a pipeline does its forward and backward passes: six schedules as plain lists.

A model is split into stages, a step into micro-batches. A *pass* takes one micro-batch through one stage. What is
planned and drawn from these lists is what runs: the runtime works through its rank's list, and waits where a pass needs
what another rank has not sent yet. A new one is a row of `_RECIPES` and a name in `config.engine_sections`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain, count

from ds_trainer.errors import ConfigError, one_of


class Kind(StrEnum):
    """What a pass computes, in the letters of the zero-bubble papers."""

    FORWARD = "F"
    BACKWARD = "B"
    """All gradients at once."""
    INPUT = "I"
    """The gradient of the stage's input, which the stage before waits for."""
    WEIGHT = "W"
    """The gradients of the stage's parameters, which nobody waits for."""


@dataclass(frozen=True, slots=True)
class Action:
    """One pass: a micro-batch through a stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """The passes of one step, in order, for every rank of a pipeline; made once for the same arguments.

    Args:
        name: As in `parallel.schedule`.
        num_ranks: Ranks of the pipeline.
        num_stages: Stages that the model is split into: `num_ranks` times those of a rank.
        num_microbatches: Micro-batches of the step.
        actions: The passes of each rank.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """Stages on each rank."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return stages_of(self.name, self.num_ranks, self.virtual_stages, rank)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        turn, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if turn % 2 and _RECIPES[self.name].is_v else place

    def source_of(self, action: Action) -> int | None:
        """The stage from whose pass of the same micro-batch an action gets hidden states or a gradient; None: none."""
        return self._neighbour(action, 1)

    def target_of(self, action: Action) -> int | None:
        """The stage that gets hidden states or a gradient from an action; None: none."""
        return self._neighbour(action, -1)

    def _neighbour(self, action: Action, step: int) -> int | None:
        if action.kind is Kind.WEIGHT:
            return None
        stage = action.stage - step if action.kind is Kind.FORWARD else action.stage + step
        return stage if 0 <= stage < self.num_stages else None


_Pass = tuple[Kind, int]
"""A pass by the number of its stage among those of the rank; micro-batches come in order."""
_F0, _F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
_B0, _B1 = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)
_I0, _I1 = (Kind.INPUT, 0), (Kind.INPUT, 1)
_W0, _W1 = (Kind.WEIGHT, 0), (Kind.WEIGHT, 1)


def _gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> list[_Pass]:
    """Every forward pass, then every backward pass: activations of all micro-batches are held.

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965
    """
    return [_F0] * microbatches + [_B0] * microbatches


def _1f1b(rank: int, ranks: int, chunks: int, microbatches: int) -> list[_Pass]:
    """Backward passes begin as soon as they can, so that a rank holds no more micro-batches than ranks follow it.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.1 (PipeDream-Flush)
    """
    ahead = min(ranks - 1 - rank, microbatches)
    return [_F0] * ahead + [_F0, _B0] * (microbatches - ahead) + [_B0] * ahead


def _interleaved_1f1b(rank: int, ranks: int, chunks: int, microbatches: int) -> list[_Pass]:
    """1F1B over several smaller stages per rank: filling and draining takes as many passes, but shorter ones.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.2
    """
    length = _round_length(ranks, microbatches)
    ahead = min((chunks - 1) * length + 2 * (ranks - 1 - rank), chunks * microbatches)
    forward, backward = _in_rounds(chunks, [length] * (microbatches // length))
    both = zip(_passes(Kind.FORWARD, forward[ahead:]), _passes(Kind.BACKWARD, backward), strict=False)
    rest = backward[len(backward) - ahead :]
    return [*_passes(Kind.FORWARD, forward[:ahead]), *chain.from_iterable(both), *_passes(Kind.BACKWARD, rest)]


def _interleaved_zero_bubble(rank: int, ranks: int, chunks: int, microbatches: int) -> list[_Pass]:
    """Interleaved 1F1B with the backward pass in two: gradients of parameters are computed where it would be idle.

    A later rank, which has fewer forward passes ahead, keeps more of them for the end: no rank holds more than another.

    Source: Qi et al. 2023, https://arxiv.org/abs/2401.10241 (ZB-H1)
    """
    length = _round_length(ranks, microbatches)
    ahead = min((chunks - 1) * length + ranks - 1 - rank, chunks * microbatches)
    forward, backward = _in_rounds(chunks, [length] * (microbatches // length))
    passes = [*_passes(Kind.FORWARD, forward[:ahead])]
    for done, chunk in enumerate(backward):
        passes += _passes(Kind.FORWARD, forward[ahead + done : ahead + done + 1])
        passes.append((Kind.INPUT, chunk))
        if done >= rank:
            passes.append((Kind.WEIGHT, backward[done - rank]))
    return [*passes, *_passes(Kind.WEIGHT, backward[max(0, len(backward) - rank) :])]


def _zbv(rank: int, ranks: int, chunks: int, microbatches: int) -> list[_Pass]:
    """Two stages per rank, placed as a V: the rank of the first is that of the last, whose backward comes at once.

    If F, I and W take equal times, no rank is idle between its first pass and its last. Fewer micro-batches than fill
    the V run as the first ones of so many, with the gaps that the others leave: torch does so too.

    Source: Qi et al. 2024, https://arxiv.org/abs/2405.15362 (V-ZB)
    """
    microbatches = max(microbatches, 2 * ranks - 1)
    after = ranks - 1 - rank
    return [
        *[_F0] * (2 * after + 1),
        *[_F1, _F0] * rank,
        *[_F1, _I1, _W1] * (after + 1),
        *[_F0, _I0, _W0, _F1, _I1, _W1] * (microbatches - 2 * ranks + 1 + rank),
        *[_I0, _W0, _F1, _I1, _W1] * after,
        *[_I0, _I1] * rank,
        *[_I0, _W0] * (after + 1),
        *[_W1] * rank,
        *[_W0] * rank,
    ]


def _dualpipev(rank: int, ranks: int, chunks: int, microbatches: int) -> list[_Pass]:
    """One half of DualPipe: two stages per rank, placed as a V; forward and backward passes of both alternate.

    Only in filling and draining are backward passes done in two.

    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.2.1; cut in half: Sea AI Lab 2025,
        https://hackmd.io/@ufotalent/r1lVXsa9Jg
    """
    after = ranks - 1 - rank
    draining = [_I1, _I0] * (rank + 1)
    split = draining[rank + 1 :] + [_I0] * after
    weights = [(Kind.WEIGHT, chunk) for _, chunk in split]
    return [
        *[_F0] * (2 * after),
        *[_F0, _F1] * (rank + 1),
        *[_I1, _W1, _F1] * after,
        *[_F0, _B1, _F1, _B0] * (microbatches - 2 * ranks + 1 + rank),
        *[_B1, _F1, _B0] * after,
        *([_B1, _B0] * (rank + 1))[: rank + 1],
        *draining[rank + 1 :],
        *chain.from_iterable((weight, _I0) for weight in weights[:after]),
        *weights[after:],
    ]


def _round_length(ranks: int, microbatches: int) -> int:
    """Micro-batches that go through one stage of a rank before it turns to its next stage: one per rank, or more."""
    return microbatches // max(1, microbatches // ranks)


def _in_rounds(chunks: int, lengths: Iterable[int]) -> tuple[list[int], list[int]]:
    """Which of its stages a rank turns to, forward and backward, for rounds of so many micro-batches."""
    forward = [chunk for length in lengths for chunk in range(chunks) for _ in range(length)]
    return forward, [chunks - 1 - chunk for chunk in forward]


def _passes(kind: Kind, chunks: Iterable[int]) -> list[_Pass]:
    return [(kind, chunk) for chunk in chunks]


@dataclass(frozen=True)
class _Recipe:
    """How a schedule is made.

    Args:
        passes: (rank, ranks, stages per rank, micro-batches) -> the rank's passes.
        takes: (ranks, micro-batches) -> whether it is defined for them.
        stages: Stages per rank it is for, from and to; the first is the default.
        is_v: Ranks hold stages first to last and back again; else they go round.
        splits_backward: Whether gradients of inputs and of parameters are passes of their own.
    """

    passes: Callable[[int, int, int, int], list[_Pass]]
    takes: Callable[[int, int], bool]
    stages: tuple[int, int]
    is_v: bool = False
    splits_backward: bool = False


_ANY = 1 << 16


def _any_number(ranks: int, microbatches: int) -> bool:
    return True


def _whole_rounds(ranks: int, microbatches: int) -> bool:
    return microbatches % _round_length(ranks, microbatches) == 0


def _fills_the_v(ranks: int, microbatches: int) -> bool:
    return microbatches >= 2 * ranks


_RECIPES = {
    "gpipe": _Recipe(_gpipe, _any_number, (1, 1)),
    "1f1b": _Recipe(_1f1b, _any_number, (1, 1)),
    "interleaved_1f1b": _Recipe(_interleaved_1f1b, _whole_rounds, (2, _ANY)),
    "interleaved_zero_bubble": _Recipe(_interleaved_zero_bubble, _whole_rounds, (2, _ANY), splits_backward=True),
    "zbv": _Recipe(_zbv, _any_number, (2, 2), is_v=True, splits_backward=True),
    "dualpipev": _Recipe(_dualpipev, _fills_the_v, (2, 2), is_v=True, splits_backward=True),
}
NAMES = tuple(_RECIPES)


@lru_cache(maxsize=16)
def make_schedule(name: str, ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    """The passes of one training step.

    Args:
        name: As in `parallel.schedule`.
        ranks: Ranks of the pipeline.
        virtual_stages: Stages on each rank.
        microbatches: Micro-batches of the step; also fewer than ranks, where the schedule takes them.

    Raises:
        ConfigError: The schedule is not defined for these numbers.
    """
    _check(name, ranks, virtual_stages, microbatches)
    rows = [_RECIPES[name].passes(rank, ranks, virtual_stages, microbatches) for rank in range(ranks)]
    return _schedule(name, ranks, virtual_stages, microbatches, rows)


@lru_cache(maxsize=16)
def forward_only(name: str, ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    """The forward passes of an evaluation, with the stages where `name` has them; any number of micro-batches."""
    if _RECIPES[name].is_v:
        full = max(microbatches, 2 * ranks - 1)
        rows = []
        for rank in range(ranks):
            ahead = 2 * (ranks - 1 - rank) + 1
            rows.append([_F0] * ahead + [_F1, _F0] * (full - ahead) + [_F1] * ahead)
    else:
        rounds = max(1, microbatches // ranks)
        short, longer = divmod(microbatches, rounds)
        forward, _ = _in_rounds(virtual_stages, [short + (turn < longer) for turn in range(rounds)])
        rows = [_passes(Kind.FORWARD, forward)] * ranks
    return _schedule(name, ranks, virtual_stages, microbatches, rows)


_COUNTED_AS = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT),
    Kind.INPUT: (Kind.INPUT,),
    Kind.WEIGHT: (Kind.WEIGHT,),
}


def _schedule(name: str, ranks: int, virtual_stages: int, microbatches: int, rows: list[list[_Pass]]) -> Schedule:
    """Numbers the passes of every rank: a stage works through the micro-batches in order, in each kind of pass."""
    actions = []
    for rank, passes in enumerate(rows):
        stages = stages_of(name, ranks, virtual_stages, rank)
        done: Counter[_Pass] = Counter()
        row = []
        for kind, chunk in passes:
            counted = _COUNTED_AS[kind]
            microbatch = done[counted[0], chunk]
            for part in counted:
                done[part, chunk] += 1
            if microbatch < microbatches:
                row.append(Action(kind, stages[chunk], microbatch))
        actions.append(tuple(row))
    return Schedule(name, ranks, ranks * virtual_stages, microbatches, tuple(actions))


def stages_of(name: str, ranks: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, in the order of the model.

    Example:
        4 ranks with 2 stages each: rank 1 holds stages 1 and 5; as a V, 1 and 6.
    """
    turns = range(virtual_stages)
    if _RECIPES[name].is_v:
        return tuple(turn * ranks + (ranks - 1 - rank if turn % 2 else rank) for turn in turns)
    return tuple(turn * ranks + rank for turn in turns)


def default_virtual_stages(name: str) -> int:
    """Stages on each rank where `parallel.virtual_stages` is not set."""
    return _RECIPES[name].stages[0]


def splits_backward(name: str) -> bool:
    """Whether gradients of inputs and of parameters are passes of their own."""
    return _RECIPES[name].splits_backward


def accepts(name: str, ranks: int, virtual_stages: int, microbatches: int) -> bool:
    """Whether the schedule is defined for these numbers; a run should not use all of them, see `schedule_problem`."""
    first, last = _RECIPES[name].stages
    return first <= virtual_stages <= last and microbatches >= 1 and _RECIPES[name].takes(ranks, microbatches)


def next_accepted(name: str, ranks: int, virtual_stages: int, at_least: int) -> int:
    """The smallest number of micro-batches, `at_least` or more, that the schedule is defined for."""
    return next(number for number in count(at_least) if accepts(name, ranks, virtual_stages, number))


def _check(name: str, ranks: int, virtual_stages: int, microbatches: int) -> None:
    if not accepts(name, ranks, virtual_stages, microbatches):
        reason = schedule_problem(name, ranks, virtual_stages, microbatches)
        assert reason is not None
        raise ConfigError(*reason)


def schedule_problem(name: str, ranks: int, virtual_stages: int, microbatches: int) -> tuple[str, str, str] | None:
    """Why a run cannot have these numbers: what was found, the rule, and what to set; None: it can.

    Args:
        name: As in `parallel.schedule`.
        ranks: `parallel.pp`.
        virtual_stages: Stages on each rank, as resolved.
        microbatches: `batch.accumulation`, as resolved.
    """
    return _refused_stages(name, virtual_stages) or _refused_count(name, ranks, virtual_stages, microbatches)


def _refused_stages(name: str, virtual_stages: int) -> tuple[str, str, str] | None:
    first, last = _RECIPES[name].stages
    if first <= virtual_stages <= last:
        return None
    amount = f"{first} or more stages" if last == _ANY else "one stage" if last == 1 else f"exactly {last} stages"
    others = [other for other, recipe in _RECIPES.items() if recipe.stages[0] <= virtual_stages <= recipe.stages[1]]
    return (
        f"parallel.virtual_stages {virtual_stages} with parallel.schedule {name}",
        f"{name} has {amount} on each rank",
        f"set parallel.virtual_stages to {first}, or parallel.schedule to {one_of(others)}",
    )


def _refused_count(name: str, ranks: int, virtual_stages: int, microbatches: int) -> tuple[str, str, str] | None:
    def works(number: int) -> bool:
        return number >= ranks and accepts(name, ranks, virtual_stages, number)

    if works(microbatches):
        return None
    below = next((number for number in range(microbatches - 1, 0, -1) if works(number)), None)
    above = next(number for number in count(microbatches + 1) if works(number))
    found = f"parallel.pp {ranks} with batch.accumulation {microbatches}"
    if below is not None:
        rounds = microbatches // ranks
        rule = f"{name} needs batch.accumulation // parallel.pp = {rounds} rounds of equally many micro-batches"
        return found, rule, f"set batch.accumulation to {below} or {above}"
    what = "stages" if name == "dualpipev" else "ranks"
    rule = f"{name} needs at least as many micro-batches as the pipeline has {what}"
    takes_any = works(2 * ranks + 1)  # Which makes no two equal rounds.
    more = "more" if takes_any else f"another multiple of {ranks}"
    return found, rule, f"set batch.accumulation to {above} or {more}"
