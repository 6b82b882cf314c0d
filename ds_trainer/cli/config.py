"""`ds-trainer config show | check | translate | import | schema`: all without torch and without a process group."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_trainer.cli.import_ import import_file
from ds_trainer.cli.printing import print_until_closed
from ds_trainer.config.backend import backend, engine_column
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.deepspeed.native_keys import unified_keys
from ds_trainer.config.io import load_config, read_config
from ds_trainer.config.key_support import key_support, known_engines
from ds_trainer.config.key_support_table import AS_BACKEND, ENGINES, cell
from ds_trainer.config.keys import flatten, leaf_values, value
from ds_trainer.config.machine import probe_machine_pure
from ds_trainer.config.memory_needs import buffers, memory_row, memory_rows_by_stage
from ds_trainer.config.path_rules import check_files, unknown_hub_ids
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.stage_assignment import model_parts, positions, tied_copy
from ds_trainer.config.tp_rules import shares_of
from ds_trainer.errors import ConfigError, ConfigErrors, UserError
from ds_trainer.interop.translate import OPTIONS, TARGETS, engine_overrides, translate
from ds_trainer.planning.checkpoint_spec import ModelSpec, quantized_error, read_spec
from ds_trainer.planning.memory import DTYPE_BYTES
from ds_trainer.planning.pp_schedules import stages_of

if TYPE_CHECKING:
    from rich.table import Table


_WIDTH_FOR_NOTES = 160
_CAPTION_WITHOUT_NOTES = (
    "accelerate does what its backend does (*: with exceptions). --backend NAME, or a pipe, says what a key is mapped "
    "to and why it is refused."
)


def run(args: argparse.Namespace) -> int:
    """Runs one action; the handler of `ds-trainer config`."""
    return print_until_closed(_act, args)


def _act(args: argparse.Namespace) -> int:
    match args.action:
        case "show":
            return _show(args)
        case "check":
            return _check(args)
        case "translate":
            return _translate(args)
        case "import":
            return import_file(args)
        case _:
            print(json.dumps(json_schema(), indent=2))
            return 0


def json_schema() -> dict:
    """The JSON Schema of a run."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema(by_alias=True)}


def resolved_run(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[ResolvedConfig, ModelSpec | None]:
    """The run that the arguments name, and its checkpoint where that is a folder on this machine."""
    config, origins = load_config(args.config, overrides, args.deepspeed_config)
    machine = probe_machine_pure(args.world, args.device or config.run.device)
    spec = _local_spec(config)
    return resolve(config, origins, machine, spec), spec


def _local_spec(config: RunConfig) -> ModelSpec | None:
    """The checkpoint's shapes where it is a folder on this machine."""
    folder = Path(config.model.path or "").expanduser()
    return read_spec(str(folder)) if config.model.path and folder.is_dir() else None


def _translate(args: argparse.Namespace) -> int:
    config, origins = load_config(args.config, args.set, args.deepspeed_config)
    to = args.to or config.parallel.engine
    if to not in TARGETS:
        raise ConfigError(
            f"parallel.engine is {to!r}, a plug-in",
            f"a run is translated for {', '.join(TARGETS)}",
            "name one of these with --to",
        )
    for option, targets in OPTIONS.items():
        if getattr(args, option) and to not in targets:
            raise ConfigError(
                f"--{option} with --to {to}", f"it is for {' and '.join(targets)}", f"remove --{option}, or change --to"
            )
    overrides = {text.partition("=")[0]: text for text in [*args.set, *engine_overrides(config, origins, to)]}
    resolved, _ = resolved_run(args, list(overrides.values()))
    translation = translate(resolved, to, python=args.python, standalone=args.standalone)
    print(translation.text)
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> int:
    loaded = read_config(args.config, args.set, args.deepspeed_config)
    errors: list[UserError] = [*loaded.errors, *check_files(loaded.config)]
    spec = None
    try:
        spec = _local_spec(loaded.config)
    except UserError as error:
        errors.append(error)
    if spec is not None and spec.is_quantized:
        errors.append(quantized_error(spec.folder))
    try:
        machine = probe_machine_pure(args.world, args.device or loaded.config.run.device)
        resolved = resolve(loaded.config, loaded.origins, machine, spec)
    except ConfigErrors as found:
        errors += found.errors
    else:
        for text in [
            *resolved.warnings,
            *_needed_by_the_command(loaded.config),
            *unknown_hub_ids(loaded.config),
            *_checked_at_load(loaded.config, spec),
        ]:
            print(f"warning: {text}")
    if errors:
        print("\n\n".join(str(error) for error in errors), file=sys.stderr)
        return 2
    print(f"{args.config}: ok for {args.world} x {machine.device}")
    return 0


def _needed_by_the_command(config: RunConfig) -> Iterator[str]:
    for key, argument in (("model.path", "model"), ("data.train", "train_dataset")):
        if value(config, key) is None:
            yield f"{key} is not set: `ds-trainer train` needs it, a script may pass Trainer({argument}=...) instead"


def _checked_at_load(config: RunConfig, spec: ModelSpec | None) -> Iterator[str]:
    for axis in ("pp", "tp"):
        size = getattr(config.parallel, axis)
        if size > 1 and spec is None and not Path(config.model.path or "").expanduser().is_dir():
            yield f"whether parallel.{axis} {size} fits the model is checked at load: it is no folder here"


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    resolved, spec = resolved_run(args, args.set)
    # A pipe or a file has no width to fit: each key stays on one line, so that grep finds it.
    console = Console(width=None if sys.stdout.isatty() else 1000)
    if args.backend is not None:
        console.print(_support_table(resolved, args.backend, console.width))
        return 0
    title = f"{args.config} on {args.world} x {resolved.machine.device}"
    value, reason = Column("value", overflow="fold"), Column("where from, or why", overflow="fold")
    table = Table(Column("key", no_wrap=True), value, reason, title=title)
    for key, text, why in rows(resolved):
        table.add_row(key, text, Path(why).name if why == args.config else why)
    console.print(table)
    for text in resolved.warnings:
        console.print(f"warning: {text}")
    parallel = resolved.config.parallel
    what = "model" if parallel.pp == 1 else "stages, all together,"
    tables = (
        (STAGE_COLUMNS, stage_rows(resolved, spec), f"the layers on each of {parallel.pp} pipeline ranks"),
        (
            SHARE_COLUMNS,
            share_rows(resolved.config, spec),
            f"the {what} on each of {parallel.tp} tensor-parallel ranks",
        ),
    )
    for columns, parts, title in tables:
        if parts:
            table = Table(*columns, title=title, padding=0)
            for part in parts:
                table.add_row(*part)
            console.print(table)
    of_what = "parameter" if parallel.tp * parallel.pp == 1 else "parameter of its part of the model"
    title = (
        f"bytes per {of_what} that each of {resolved.dp_size} data-parallel ranks keeps, buffers and activations apart"
    )
    # Narrow columns of numbers leave space for the reason on a terminal of 80 columns.
    *numbers, why = COST_COLUMNS
    narrow = (Column(name.replace(" ", "\n"), no_wrap=True) for name in numbers)
    costs = Table(*narrow, Column(why), title=title, padding=0)
    for row in cost_rows(resolved):
        costs.add_row(*row)
    console.print(costs)
    for text in size_lines(resolved, spec):
        console.print(text)
    return 0


def _support_table(resolved: ResolvedConfig, engine: str, width: int) -> Table:
    """What one engine, or each of them, does with every key; on a narrow terminal one word for each of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    engines = ENGINES if engine == "all" else (engine,)
    if len(engines) > 1 and width < _WIDTH_FOR_NOTES:
        narrow = (Column(name, no_wrap=True) for name in engines)
        table = Table(
            Column("key", overflow="fold"),
            *narrow,
            caption=_CAPTION_WITHOUT_NOTES,
            padding=(0, 1, 0, 0),
            box=SIMPLE_HEAD,
        )
        for key in leaf_values(resolved.config):
            table.add_row(key, *(_word(cell(key, name)) for name in engines))
        return table
    columns = [Column(name, overflow="fold") for name in ("value", *engines)]
    table = Table(Column("key", no_wrap=True), *columns)
    for key, item in leaf_values(resolved.config).items():
        table.add_row(key, json.dumps(item), *(cell(key, name) for name in engines))
    return table


def _word(text: str) -> str:
    """The status of a key without its note; `*` where accelerate departs from what it runs on."""
    if text.startswith(AS_BACKEND):
        return "as that" if text == AS_BACKEND else "as that*"
    return text.partition(":")[0]


def rows(resolved: ResolvedConfig) -> list[tuple[str, str, str]]:
    """Key, value and reason of every key that the run uses."""
    unused = _unused_keys(resolved)
    return [
        (key, json.dumps(item), resolved.reasons[key])
        for key, item in leaf_values(resolved.config).items()
        if key not in unused
    ]


def _unused_keys(resolved: ResolvedConfig) -> set[str]:
    """Keys that the engine refuses, or that belong to a stage, an offload or a dtype that the run does not use."""
    engine = engine_column(resolved.config)
    if engine not in known_engines():
        return set()
    unused = {key for key in leaf_values(resolved.config) if key_support(key, engine).status == "refused"}
    if backend(resolved.config) == "deepspeed":
        written = flatten(to_deepspeed(resolved))
        natives = unified_keys().items()
        unwritten = {key for _, key in natives} - {key for native, key in natives if native in written}
        unused |= {key for key in unwritten if not key.endswith((".device", "precision.dtype"))}
    if backend(resolved.config) == "fsdp2":
        unused |= {key for key in resolved.reasons if key.startswith("zero.") and resolved.reasons[key] == "default"}
    return unused | {"$schema"}


STAGE_COLUMNS = ("stage", "rank", "layers", "share of the time", "parameters")


def stage_rows(resolved: ResolvedConfig, spec: ModelSpec | None) -> list[tuple[str, ...]]:
    """The layers of every stage and what they cost, under `STAGE_COLUMNS`; none where they are not known.

    Parameters are those of the stage before they are split or sharded, with its copy of a tied one.
    """
    parts = None if spec is None else model_parts(spec)
    if resolved.stages is None or spec is None or parts is None:
        return []
    parallel, ranges = resolved.config.parallel, resolved.stages
    assert parallel.virtual_stages is not None
    ranks = {
        stage: rank
        for rank in range(parallel.pp)
        for stage in stages_of(parallel.schedule, parallel.pp, parallel.virtual_stages, rank)
    }
    flops = parts.flops(positions(resolved.config, spec.max_positions)).of_stages(ranges)
    elements, copied = parts.parameters().of_stages(ranges), tied_copy(resolved.config, spec)
    table: list[tuple[str, ...]] = []
    for stage, (start, stop) in enumerate(ranges):
        ends = [("embedding", stage == 0), (_layers(start, stop), True), ("head", stage == len(ranges) - 1)]
        held = " + ".join(text for text, is_there in ends if is_there)
        share = f"{flops[stage] / sum(flops):.1%}"
        number = f"{elements[stage]:,.0f}"
        if copied and stage == len(ranges) - 1:
            number = f"{elements[stage] + copied:,.0f} (tied: {copied:,} of them are a copy)"
        table.append((f"{stage}", f"{ranks[stage]}", held, share, number))
    return table


def _layers(start: int, stop: int) -> str:
    return f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"


SHARE_COLUMNS = ("what", "in all", "on a rank")


def share_rows(config: RunConfig, spec: ModelSpec | None) -> list[tuple[str, str, str]]:
    """Heads, widths, experts and vocabulary per tensor-parallel rank, under `SHARE_COLUMNS`; none if not known."""
    shares = None if spec is None or spec.pickled or config.parallel.tp == 1 else shares_of(config, spec)
    return [] if shares is None else shares.table(config.parallel.tp)


def size_lines(resolved: ResolvedConfig, spec: ModelSpec | None) -> list[str]:
    """The parameters of the model and the bytes that a rank keeps of them; none where the size is not known."""
    on_rank = resolved.size.num_parameters
    if spec is None or on_rank is None:
        return []
    row, config = memory_row(resolved), resolved.config
    copied = tied_copy(config, spec) // config.parallel.tp
    # The copy has no optimizer state of its own.
    of_copy = copied * (DTYPE_BYTES[config.precision.dtype or "fp32"] + DTYPE_BYTES["fp32"])
    apart = sum(item.size for item in buffers(resolved) if item.place != "nvme")
    held = [on_rank * each + of_copy for each in (row.after_backward, row.after_step)]
    some = f", {on_rank:,} of them on a rank" if on_rank != spec.num_parameters else ""
    after_backward, after_step, beside = (f"{size / 1e9:,.3g} GB" for size in (*held, apart))
    return [
        f"{spec.num_parameters:,} parameters{some}; a rank keeps {after_backward} after a backward pass and "
        f"{after_step} after a step, beside buffers of up to {beside} and activations"
    ]


COST_COLUMNS = ("stage", "gradients", "after backward", "after step", "on host", "on NVMe", "ZeRO paper", "why")


def cost_rows(resolved: ResolvedConfig) -> list[tuple[str, ...]]:
    """What every ZeRO stage would keep, under `COST_COLUMNS`; the run's own row is marked."""
    config = resolved.config
    is_zero = backend(config) == "deepspeed"
    table = []
    for (stage, grad_dtype), row in memory_rows_by_stage(resolved).items():
        own = grad_dtype == config.precision.grad_dtype and stage == (config.zero.stage if is_zero else 0)
        numbers = (row.after_backward, row.after_step, row.host, row.nvme, row.paper)
        name = f"{stage}, this run" if own else str(stage)
        table.append((name, grad_dtype, *(f"{number:.4g}" for number in numbers), row.why))
    return table
