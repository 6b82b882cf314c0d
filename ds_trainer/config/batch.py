"""The batch equation: global_size = micro_size x accumulation x data-parallel ranks. Pure.

Under a pipeline accumulation is the number of micro-batches that pass through it in a step, which its schedule must
take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.config.training_sections import BatchConfig
from ds_trainer.errors import ConfigError
from ds_trainer.planning.pp_schedules import schedule_problem

_RULE = "batch.global_size = batch.micro_size x batch.accumulation x data-parallel ranks"
_PER_PIPELINE_RANK = 4
"""Micro-batches per pipeline rank where no key determines them: filling and draining take (p-1)/(5p-1) of a step."""


@dataclass(frozen=True)
class BatchSizes:
    """A solved batch equation.

    Args:
        global_size: Samples per optimizer step over all ranks.
        micro_size: Samples per forward pass of one rank.
        accumulation: Forward passes of one rank per optimizer step.
        reasons: Key of the section -> why it has its value, for those that were derived.
    """

    global_size: int
    micro_size: int
    accumulation: int
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Pipeline:
    """The settings that decide how many micro-batches a step can have.

    Args:
        schedule: As in `parallel.schedule`.
        ranks: `parallel.pp`.
        virtual_stages: Stages on each rank, as many as the schedule allows.
    """

    schedule: str = "1f1b"
    ranks: int = 1
    virtual_stages: int = 1

    def takes(self, accumulation: int) -> bool:
        """Whether a step can have so many micro-batches."""
        return self.ranks == 1 or schedule_problem(self.schedule, self.ranks, self.virtual_stages, accumulation) is None

    def nearest(self, accumulation: int) -> list[int]:
        """The nearest accepted numbers below and above one that is not accepted."""
        below = next((number for number in range(accumulation - 1, 0, -1) if self.takes(number)), None)
        above = accumulation + 1
        while not self.takes(above):
            above += 1
        return [number for number in (below, above) if number is not None]


@dataclass(frozen=True)
class _DPRanks:
    """Data-parallel ranks: how many, and how error texts derive the number."""

    number: int
    tp: int
    pp: int

    def __str__(self) -> str:
        axes = [f"parallel.{axis} {size}" for axis, size in (("pp", self.pp), ("tp", self.tp)) if size > 1]
        divisor = axes[0] if len(axes) == 1 else f"({' x '.join(axes)})"
        every = f" ({self.number * self.tp * self.pp} ranks / {divisor})" if axes else ""
        return f"{self.number} data-parallel ranks{every}"


def solve_batch(batch: BatchConfig, dp_size: int, tp: int = 1, pipeline: Pipeline | None = None) -> BatchSizes:
    """Fills in the numbers that the given ones determine; the others are 1, or under a pipeline what it takes.

    Args:
        batch: Section with any of the three numbers.
        dp_size: Data-parallel ranks, which see different samples.
        tp: Tensor-parallel ranks, which see the same samples.
        pipeline: The pipeline; None: there is none.

    Raises:
        ConfigError: The numbers contradict one another, or the pipeline does not take them; names all of them and the
            nearest that work.
    """
    total, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    pipeline = pipeline or Pipeline()
    ranks = _DPRanks(dp_size, tp, pipeline.ranks)
    if total is None:
        solved = _from_factors(micro, accumulation, ranks, pipeline)
    else:
        solved = _from_total(total, micro, accumulation, ranks, pipeline)
    if not pipeline.takes(solved.accumulation):
        raise _not_taken(batch, solved, ranks, pipeline)
    return solved


def _from_total(
    total: int, micro: int | None, accumulation: int | None, ranks: _DPRanks, pipeline: Pipeline
) -> BatchSizes:
    reasons: dict[str, str] = {}
    if micro is None and accumulation is None:
        micro = _smallest_micro_size(total, ranks, pipeline)
        reasons["micro_size"] = (
            f"the smallest that leaves as many micro-batches as {pipeline.schedule} takes"
            if micro > 1
            else "1 needs the least memory; the rest is accumulated"
        )
    known = (micro or 1) * (accumulation or 1) * ranks.number
    if total % known or (micro and accumulation and total != known):
        raise _contradiction(total, micro, accumulation, ranks)
    derived = total // known
    if accumulation is None:
        reasons["accumulation"] = f"{total} / (micro_size {micro} x {ranks})"
    elif micro is None:
        reasons["micro_size"] = f"{total} / (accumulation {accumulation} x {ranks})"
    return BatchSizes(total, micro or derived, accumulation or derived, reasons)


def _smallest_micro_size(total: int, ranks: _DPRanks, pipeline: Pipeline) -> int:
    """The smallest size whose number of micro-batches the pipeline takes."""
    share = total // ranks.number
    if total % ranks.number:
        return 1  # No size divides it: the error names those that do.
    return next((n for n in range(1, share + 1) if share % n == 0 and pipeline.takes(share // n)), 1)


def _from_factors(micro: int | None, accumulation: int | None, ranks: _DPRanks, pipeline: Pipeline) -> BatchSizes:
    reasons = {}
    if micro is None:
        reasons["micro_size"] = "1 where nothing else determines it"
    if accumulation is None and pipeline.ranks == 1:
        accumulation, reasons["accumulation"] = 1, "1 where nothing else determines it"
    elif accumulation is None:
        accumulation = _PER_PIPELINE_RANK * pipeline.ranks
        bubble = (pipeline.ranks - 1) / (accumulation + pipeline.ranks - 1)
        reasons["accumulation"] = (
            f"{_PER_PIPELINE_RANK} x parallel.pp {pipeline.ranks}: the pipeline fills and drains in {bubble:.0%} of a "
            "step or less"
        )
    micro, accumulation = micro or 1, accumulation or 1
    reasons["global_size"] = f"micro_size {micro} x accumulation {accumulation} x {ranks}"
    return BatchSizes(micro * accumulation * ranks.number, micro, accumulation, reasons)


def _not_taken(batch: BatchConfig, solved: BatchSizes, ranks: _DPRanks, pipeline: Pipeline) -> ConfigError:
    """The error for a number of micro-batches that the schedule refuses, with every single change that works."""
    refused = schedule_problem(pipeline.schedule, pipeline.ranks, pipeline.virtual_stages, solved.accumulation)
    assert refused is not None
    found, rule, change = refused
    numbers = pipeline.nearest(solved.accumulation)
    if batch.accumulation is None:
        found += f" (global_size {solved.global_size} / (micro_size {solved.micro_size} x {ranks}))"
    if batch.global_size is None:
        return ConfigError(found, rule, change)
    totals = [number * solved.micro_size * ranks.number for number in numbers]
    with_it = "" if batch.accumulation is None else f" and batch.accumulation to {_either(numbers)}"
    fixes = [f"batch.global_size to {_either(totals)}{with_it}"]
    share = solved.global_size // ranks.number
    taken = [n for n in range(1, share + 1) if share % n == 0 and pipeline.takes(n)]
    if taken:
        nearest = min(taken, key=lambda number: (abs(number - solved.accumulation), number))
        changed = {"accumulation": nearest, "micro_size": share // nearest}
        named = [name for name in changed if getattr(batch, name) is not None]
        fixes.append(" and ".join(f"batch.{name} to {changed[name]}" for name in named))
    return ConfigError(found, rule, f"set {', or '.join(filter(None, fixes))}")


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


def _contradiction(total: int, micro: int | None, accumulation: int | None, ranks: _DPRanks) -> ConfigError:
    dp_size = ranks.number
    known = (micro or 1) * (accumulation or 1) * dp_size
    factors = [
        f"batch.micro_size {micro}" if micro else "",
        f"batch.accumulation {accumulation}" if accumulation else "",
    ]
    product = " x ".join([*filter(None, factors), str(ranks)])
    if micro and accumulation:
        fixes = [f"batch.global_size to {known}"]
        if total % (micro * dp_size) == 0:
            fixes.append(f"batch.accumulation to {total // (micro * dp_size)}")
        if total % (accumulation * dp_size) == 0:
            fixes.append(f"batch.micro_size to {total // (accumulation * dp_size)}")
        return ConfigError(f"batch.global_size {total}, but {product} = {known}", _RULE, f"set {' or '.join(fixes)}")
    below, above = total // known * known, -(-total // known) * known
    fixes = [f"batch.global_size to {' or '.join(str(size) for size in (below, above) if size)}"]
    name, given = ("micro_size", micro) if micro else ("accumulation", accumulation)
    if given and total % dp_size == 0:
        share = total // dp_size
        nearest = min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: (abs(n - given), n))
        fixes.append(f"batch.{name} to {nearest}")
    return ConfigError(
        f"batch.global_size {total} is no multiple of {product} = {known}", _RULE, f"set {' or '.join(fixes)}"
    )
