"""`ds-trainer doctor`: shows what this machine can run, and compiles DeepSpeed's ops ahead of the first run."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from ds_trainer.errors import ConfigError
from ds_trainer.host.deepspeed_ops import BUILDERS, ensure_ops, use_own_extensions_dir
from ds_trainer.host.doctor import Check, run_checks
from ds_trainer.host.toolchain import has_libaio


def run(args: argparse.Namespace) -> int:
    """The handler of `ds-trainer doctor`.

    Returns:
        0, or 1 when no run can work on this machine.
    """
    use_own_extensions_dir()
    console = Console()
    if args.build_ops:
        ensure_ops(_checked(args.ops) if args.ops else _usual_ops(console))
    checks = run_checks()
    console.print(table(checks))
    return int(any(check.is_broken for check in checks))


def table(checks: list[Check]) -> Table:
    """The report as a table."""
    out = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "note"):
        out.add_column(heading, overflow="fold")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]no[/]" if check.needed else "[yellow]--[/]"
        out.add_row(mark, check.name, check.value, check.note)
    return out


def _checked(ops: list[str]) -> list[str]:
    unknown = [op for op in ops if op not in BUILDERS]
    if unknown:
        raise ConfigError(
            f"--ops names {', '.join(unknown)}",
            f"the ops that a run can use are {', '.join(BUILDERS)}",
            "name some of these, or leave --ops out",
        )
    return ops


def _usual_ops(console: Console) -> list[str]:
    """What offload with AdamW needs: the CPU optimizer, and asynchronous I/O where libaio is installed."""
    if has_libaio():
        return ["cpu_adam", "async_io"]
    console.print(
        "async_io is left out: libaio is missing, so nvme offload cannot run (Debian: apt install libaio-dev)"
    )
    return ["cpu_adam"]
