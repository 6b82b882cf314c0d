"""`ds-trainer plan schedule`: the timeline of a run's pipeline beside what other schedules would do. Without torch."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size

from ds_trainer.cli.config import resolved_run
from ds_trainer.cli.printing import print_until_closed
from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.config.io import load_config
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.stage_assignment import assign_layers, model_parts, num_stages, positions
from ds_trainer.errors import ConfigError
from ds_trainer.planning.checkpoint_spec import ModelSpec
from ds_trainer.planning.pp_drawing import as_text, plot_timeline, title
from ds_trainer.planning.pp_schedules import NAMES, Kind, default_virtual_stages, make_schedule, schedule_problem
from ds_trainer.planning.pp_timeline import Timeline, simulate

_MEANINGS = {
    Kind.FORWARD: "F: forward",
    Kind.BACKWARD: "B: backward, twice as long",
    Kind.INPUT: "I: backward, input",
    Kind.WEIGHT: "W: backward, weights",
}
_PICTURES = (".png", ".pdf", ".svg")
COLUMNS = ("schedule", "stages", "bubble", "in flight", "step", "")


def run(args: argparse.Namespace) -> int:
    """Plans; the handler of `ds-trainer plan`."""
    return print_until_closed(_schedule, args)


def _schedule(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    picture = None if args.output is None else _picture(args.output)
    parallel = load_config(args.config, args.set, args.deepspeed_config)[0].parallel
    if parallel.pp == 1:
        raise ConfigError(
            f"{args.config} has parallel.pp 1",
            "a schedule is the order in which micro-batches pass through the ranks of a pipeline",
            "set parallel.pp to 2 or more, in the file or with --set parallel.pp=N",
        )
    args.world = args.world or _one_replica(parallel)
    resolved, spec = resolved_run(args, args.set)
    timeline = simulated(resolved.config, spec)
    width = get_terminal_size((100, 24)).columns
    print(f"{title(timeline)}\n\n{as_text(timeline, width)}\n")
    for line in described(resolved, spec, timeline):
        print(line)
    table = Table(*COLUMNS, title="each schedule with these ranks and micro-batches", title_justify="left")
    for row in compared(resolved.config, spec):
        table.add_row(*row)
    Console(width=width).print("", table)
    for name in NAMES:
        if why := _refused(_with_schedule(resolved.config, name), spec):
            print(why)
    if picture is not None:
        plot_timeline(timeline, picture)
        print(f"picture: {picture}")
    return 0


def _picture(name: str) -> Path:
    path = Path(name)
    if path.suffix not in _PICTURES:
        raise ConfigError(
            f"--output {name}", f"a picture is a {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}", "change its ending"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--output {name}", f"{path.parent} is no folder", "make it, or name another one")
    return path


def _one_replica(parallel: ParallelConfig) -> int:
    """Ranks of the smallest world that the run fits."""
    return parallel.pp * parallel.tp * parallel.dp_replicate * (parallel.dp_shard or 1)


def simulated(config: RunConfig, spec: ModelSpec | None) -> Timeline:
    """One step of a resolved run; a forward pass of a stage takes 1 on average, a backward pass twice as long.

    Args:
        config: The run.
        spec: The checkpoint, whose FLOPs are the costs of the stages; None: all stages cost the same.
    """
    parallel, batch = config.parallel, config.batch
    assert parallel.virtual_stages is not None and batch.accumulation is not None
    schedule = make_schedule(parallel.schedule, parallel.pp, parallel.virtual_stages, batch.accumulation)
    return simulate(schedule, stage_costs=stage_costs(config, spec))


def stage_costs(config: RunConfig, spec: ModelSpec | None) -> Sequence[float] | None:
    """The cost of each stage, 1 on average; None where it is not known."""
    parts = None if spec is None else model_parts(spec)
    if spec is None or parts is None:
        return None
    of_stages = parts.flops(positions(config, spec.max_positions)).of_stages(
        assign_layers(config, parts, spec.max_positions)
    )
    return [cost * len(of_stages) / sum(of_stages) for cost in of_stages]


def described(resolved: ResolvedConfig, spec: ModelSpec | None, timeline: Timeline) -> Iterator[str]:
    """The figures of a timeline, one line each."""
    schedule = timeline.schedule
    kinds = Counter(action.kind for action in schedule.actions[0])
    legend = [*(text for kind, text in _MEANINGS.items() if kind in kinds), "dots: idle"]
    if schedule.virtual_stages > 1:
        legend.append("lower case: every second stage of a rank")
    yield "; ".join(legend)
    yield f"micro-batches  {schedule.num_microbatches} (batch.accumulation: {resolved.reasons['batch.accumulation']})"
    yield f"bubble         {timeline.idle:.1%} of the ranks' time in a step"
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_microbatches)
    yield f"in flight      {peaks} micro-batches at most, by rank, whose activations it holds"
    yield f"passes         {' + '.join(f'{kinds[kind]} {kind}' for kind in Kind if kind in kinds)} on each rank"
    length = timeline.length / schedule.virtual_stages
    part = f"forward passes through 1/{schedule.num_ranks} of the model"
    yield f"step           takes {length:.4g} {part}; {length * (1 - timeline.idle):.4g} without a bubble"
    costs = stage_costs(resolved.config, spec)
    if costs is None:
        yield "stages         taken as equally long: model.path is no folder here that shows its layers"
    else:
        yield f"stages         the longest takes {max(costs):.2f} times the mean, by FLOPs"


def compared(config: RunConfig, spec: ModelSpec | None) -> Iterator[tuple[str, ...]]:
    """A row under `COLUMNS` for every schedule, with the run's ranks and micro-batches."""
    for name in NAMES:
        other = _with_schedule(config, name)
        stages = f"{other.parallel.virtual_stages}"
        if _refused(other, spec):
            yield name, stages, "", "", "", "refused"
            continue
        timeline = simulated(other, spec)
        peak, length = max(timeline.peak_microbatches), timeline.length / timeline.schedule.virtual_stages
        note = "this run" if name == config.parallel.schedule else ""
        yield name, stages, f"{timeline.idle:.1%}", f"{peak:g}", f"{length:.4g}", note


def _with_schedule(config: RunConfig, name: str) -> RunConfig:
    """The run under another schedule: with as many stages on a rank if the schedule allows it, assigned anew."""
    parallel = config.parallel
    if name == parallel.schedule:
        return config
    assert parallel.virtual_stages is not None
    takes = schedule_problem(name, parallel.pp, parallel.virtual_stages, 4 * parallel.pp) is None
    stages = parallel.virtual_stages if takes else default_virtual_stages(name)
    changed = {"schedule": name, "virtual_stages": stages, "pp_split": None}
    return config.model_copy(update={"parallel": parallel.model_copy(update=changed)})


def _refused(config: RunConfig, spec: ModelSpec | None) -> str | None:
    """The rule that refuses the schedule for this run, and what to change; None: it is accepted."""
    parallel, batch = config.parallel, config.batch
    assert parallel.virtual_stages is not None and batch.accumulation is not None
    if reason := schedule_problem(parallel.schedule, parallel.pp, parallel.virtual_stages, batch.accumulation):
        _, rule, change = reason
        return f"{rule}: {change}"
    parts = None if spec is None else model_parts(spec)
    if parts is not None and parts.num_layers < num_stages(parallel):
        return f"{parallel.schedule} has {num_stages(parallel)} stages here, and the model {parts.num_layers} layers"
    return None
