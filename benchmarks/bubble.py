"""What share of a step the ranks of a pipeline are idle, by schedule, held against the formula (p - 1) / (m + p - 1).

    python benchmarks/bubble.py

p real processes joined by gloo run m micro-batches through the real runtime. Their layers compute nothing: a rank's
forward pass, the gradients of its input, and those of its weights are 100 ms of sleep each, or 50 ms for each stage
where it has two. So two cores do for 8 ranks, and what is measured is waiting. Idle is the time from a common start to
the last rank's end, less what a rank has slept: the mean over the ranks, as a share of that time. About 5 minutes.

Source: the formula is Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.1, as a share of the step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from ds_trainer.parallel.deferred_weight_grads import gradient_or_defer
from ds_trainer.parallel.pipeline.runtime import PipelineRuntime
from ds_trainer.planning.pp_schedules import Schedule, default_virtual_stages, make_schedule, schedule_problem
from ds_trainer.planning.pp_timeline import simulate

SECONDS = 0.1
"""Of a forward pass through the layers of a rank, whether they are one stage or several."""
MICROBATCHES = {4: (4, 8, 16, 32), 8: (8, 16, 32)}
"""Ranks -> micro-batches: at every doubling the formula falls to little more than half."""
REHEARSED = {2: (4,)}
BY_FORMULA, BELOW_FORMULA = ("gpipe", "1f1b"), ("interleaved_1f1b", "interleaved_zero_bubble")
SCHEDULES = (*BY_FORMULA, *BELOW_FORMULA, "zbv", "dualpipev")
TOLERANCE = 0.1
ZBV_SHARE = 1 / 3
"""Of 1F1B's idle time, from twice as many micro-batches as ranks on."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Args:
        ranks: p.
        microbatches: m.
        idle: Measured share of the step, of each schedule that takes these numbers.
    """

    ranks: int
    microbatches: int
    idle: dict[str, float]

    @property
    def formula(self) -> float:
        """What GPipe and 1F1B should come to."""
        return formula(self.ranks, self.microbatches)

    def error(self, name: str) -> float:
        """A schedule's distance from the formula, relative to it."""
        return abs(self.idle[name] / self.formula - 1)

    def failures(self) -> list[str]:
        """Which criteria do not hold."""
        told = {name: f"{name}, p = {self.ranks}, m = {self.microbatches}" for name in self.idle}
        failed = [
            f"{told[name]}: {self.error(name):.0%} from the formula"
            for name in BY_FORMULA
            if self.error(name) > TOLERANCE
        ]
        failed += [f"{told[name]}: not below the formula" for name in BELOW_FORMULA if self.idle[name] >= self.formula]
        ratio = self.idle["zbv"] / self.idle["1f1b"]
        if self.microbatches >= 2 * self.ranks and ratio > ZBV_SHARE:
            failed.append(f"{told['zbv']}: {ratio:.2f} of 1f1b's")
        return failed


def formula(ranks: float, microbatches: float) -> float:
    """(p - 1) / (m + p - 1)."""
    return (ranks - 1) / (microbatches + ranks - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the idle time of pipeline schedules.")
    parser.add_argument("--plot", type=Path, default=Path("outputs/bubble.png"), help="where the plot is written")
    parser.add_argument("--small", action="store_true", help="rehearse it with 2 ranks, in seconds")
    args = parser.parse_args()
    sizes = REHEARSED if args.small else MICROBATCHES
    cases = [case for ranks, counts in sizes.items() for case in measure(ranks, counts)]
    Console(width=120).print(table(cases))
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    plot(cases, args.plot)
    print(f"plot: {args.plot}")
    failures = [text for case in cases for text in case.failures()]
    print(*failures, sep="\n", end="\n" if failures else "")
    print(f"worst_error={max(case.error(name) for case in cases for name in BY_FORMULA):.3f}")
    sys.exit(bool(failures))


def measure(ranks: int, counts: Sequence[int]) -> list[Case]:
    """All measurements with one number of ranks, in as many new processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PipelineRuntime.__module__])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
        running = [pool.submit(run_rank, rank, ranks, counts, f"{folder}/rendezvous") for rank in range(ranks)]
        return [each.result() for each in running][0]


def run_rank(rank: int, ranks: int, counts: Sequence[int], rendezvous: str) -> list[Case]:
    """One rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, ranks), rank=rank, world_size=ranks)
    cases = []
    for microbatches in counts:
        idle = {}
        for name in SCHEDULES:
            chunks = default_virtual_stages(name)
            if schedule_problem(name, ranks, chunks, microbatches) is None:
                idle[name] = idle_share(make_schedule(name, ranks, chunks, microbatches))
        cases.append(Case(ranks, microbatches, idle))
        if rank == 0:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in idle.items())
            print(f"p = {ranks}, m = {microbatches}: formula {cases[-1].formula:.1%}, {shares}", flush=True)
    dist.destroy_process_group()
    return cases


class SleepingStage(nn.Module):
    """A stage that computes nothing, for as long as it is told to, and knows how long it has done so.

    Attributes:
        seconds: How long a forward pass takes; the gradient of the input and that of the weight take as long each.
        slept_s: How long all its passes took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = self.slept_s = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hands on what it is given."""
        return _Sleep.apply(hidden, self.weight, self)

    def sleep(self) -> None:
        """One pass, or one half of a backward pass."""
        began = time.monotonic()
        time.sleep(self.seconds)
        self.slept_s += time.monotonic() - began

    def gradient_of_weight(self) -> torch.Tensor:
        """What comes later where the backward pass is in two."""
        self.sleep()
        return torch.zeros_like(self.weight)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, stage):
        ctx.stage = stage
        stage.sleep()
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.stage.sleep()
        return grad.clone(), gradient_or_defer(ctx.stage.weight, ctx.stage.gradient_of_weight), None


def idle_share(schedule: Schedule) -> float:
    """The share of a step in which ranks wait, all ranks together; measured in the second of two steps."""
    group = dist.group.WORLD
    assert group is not None
    runtime = PipelineRuntime(group, group, torch.device("cpu"))
    stage, batch = SleepingStage(), torch.zeros(1, 1, 1)

    def forward(number: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        output = stage(batch if hidden is None else hidden)
        return output.sum() if number == schedule.num_stages - 1 else output

    shapes = [(1, 1)] * schedule.num_microbatches
    runtime.run(schedule, forward, shapes)  # Makes connections, and tells formats.
    stage.seconds, stage.slept_s = SECONDS / schedule.virtual_stages, 0.0
    dist.barrier()
    began = time.monotonic()
    runtime.run(schedule, forward, shapes)
    own = began, time.monotonic(), stage.slept_s
    everyones: list[tuple[float, float, float]] = [own] * schedule.num_ranks
    dist.all_gather_object(everyones, own)
    begins, ends, slept = zip(*everyones, strict=True)
    return 1 - statistics.mean(slept) / (max(ends) - min(begins))


def table(cases: list[Case]) -> Table:
    """Every measurement beside the formula."""
    out = Table("p", "m", "formula", *SCHEDULES, title="idle, % of the step", caption="-: not for so few micro-batches")
    for case in cases:
        shares = (f"{100 * case.idle[name]:.1f}" if name in case.idle else "-" for name in SCHEDULES)
        out.add_row(str(case.ranks), str(case.microbatches), f"{100 * case.formula:.1f}", *shares)
    return out


def plot(cases: list[Case], path: Path) -> None:
    """Draws what was measured as points, and as lines the formula and the timelines that the schedules plan."""
    import matplotlib
    from matplotlib.figure import Figure

    from ds_trainer.plots import STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        of_ranks = {ranks: list(group) for ranks, group in groupby(cases, lambda case: case.ranks)}
        panels = figure.subplots(1, len(of_ranks), sharey=True, squeeze=False)[0]
        for axes, (ranks, group) in zip(panels, of_ranks.items(), strict=True):
            draw_panel(axes, ranks, group)
        panels[0].set(ylabel="idle, % of the step", ylim=(0, 50))
        panels[0].plot([], [], ":", color="gray", linewidth=1, label="as the schedule plans it")
        panels[0].legend(fontsize=9)
        figure.savefig(path, dpi=150)


def draw_panel(axes, ranks: int, cases: list[Case]) -> None:
    """One number of ranks."""
    counts = [case.microbatches for case in cases]
    curve = range(min(counts), max(counts) + 1)
    axes.plot(curve, [100 * formula(ranks, m) for m in curve], color="black", label="(p - 1) / (m + p - 1)")
    for name, marker in zip(SCHEDULES, "o+s^Dx", strict=True):
        measured = {case.microbatches: 100 * case.idle[name] for case in cases if name in case.idle}
        (points,) = axes.plot(*zip(*measured.items(), strict=True), marker, label=name)
        if name not in BY_FORMULA:
            chunks = default_virtual_stages(name)
            planned = [100 * simulate(make_schedule(name, ranks, chunks, m)).idle for m in measured]
            axes.plot(list(measured), planned, ":", color=points.get_color(), linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(title=f"{ranks} ranks", xlabel="micro-batches")


if __name__ == "__main__":
    main()
