"""What this package costs: its steps and its start, held against bare loops on DeepSpeed and FSDP2, and the HF Trainer.

    python benchmarks/overhead.py

Every measurement is two new processes on this machine's CPU, one thread each, joined by gloo. The two sides of a
comparison take turns, so that a slow spell of the machine hits both; tokens/s are those of a run's median step, a ratio
is taken within each pair, and the median of the pairs is what counts. All sides train the same model on the same
samples and must find the same losses.

Logging: ours writes a line of metrics every step and transformers' Trainer logs every step; the bare loops print
nothing, gather their losses after the clock has stopped, and neither check samples nor ask the other rank for faults.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sides.workload import RANKS, STEPS, WARM_UP

SIDES = Path(__file__).parent / "sides"
PAIRS = 7
TIMEOUT_S = 180.0
LOSS_TOLERANCE = 1e-5
OURS_DDP, HF_DDP = ("ours.py", "ddp"), ("hf_trainer.py",)
OURS_ZERO2, BARE_ZERO2 = ("ours.py", "deepspeed"), ("bare_deepspeed.py",)
OURS_FSDP2, BARE_FSDP2 = ("ours.py", "fsdp2"), ("bare_fsdp2.py",)
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ratio:
    """One comparison over all pairs.

    Args:
        name: As printed in the last line.
        ours: Our measurement of each pair.
        peer: The peer's.
        unit: Of both.
    """

    name: str
    ours: list[float]
    peer: list[float]
    unit: str

    @property
    def quartiles(self) -> list[float]:
        """First quartile, median and third quartile of the pairs' ratios."""
        ratios = [a / b for a, b in zip(self.ours, self.peer, strict=True)]
        return statistics.quantiles(ratios, n=4, method="inclusive")


def main() -> None:
    console = Console()
    console.print(f"{RANKS} ranks, steps {WARM_UP + 1} to {STEPS} timed, {PAIRS} pairs; {os.cpu_count()} cores")
    zero2, fsdp2, ddp = [], [], []
    for _ in range(PAIRS):
        zero2.append(measure_pair(console, OURS_ZERO2, BARE_ZERO2))
        fsdp2.append(measure_pair(console, OURS_FSDP2, BARE_FSDP2))
        ddp.append(measure_pair(console, OURS_DDP, HF_DDP))
    ratios = [
        ratio("ratio_vs_bare", zero2, "tokens_per_s", "tokens/s"),
        ratio("ratio_vs_bare_fsdp2", fsdp2, "tokens_per_s", "tokens/s"),
        ratio("ratio_vs_hf", ddp, "tokens_per_s", "tokens/s"),
        ratio("first_step_ratio", ddp, "first_step_s", "s"),
    ]
    console.print(table(ratios))
    for arguments in (["--help"], ["config", "show", str(SIDES.parents[1] / "ds_configs" / "smoke" / "zero2.json")]):
        seconds = statistics.median(time_command(arguments) for _ in range(PAIRS))
        console.print(f"ds-trainer {' '.join(arguments[:2])}: {seconds:.2f} s (median of {PAIRS})")
    print(" ".join(f"{r.name}={r.quartiles[1]:.3f}" for r in ratios))


def measure_pair(console: Console, ours: Sequence[str], peer: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs one side after the other, and makes sure that they did the same work."""
    a, b = run_side(ours), run_side(peer)
    furthest = max(abs(x - y) / y for x, y in zip(a["losses"], b["losses"], strict=True))
    if furthest > LOSS_TOLERANCE:
        raise SystemExit(f"{ours} and {peer} do not train the same: losses {a['losses']} and {b['losses']}")
    if a.get("native") != b.get("native"):
        raise SystemExit(f"the native configs differ: {a.get('native')} and {b.get('native')}")
    console.print(
        f"{' '.join(ours)} against {' '.join(peer)}: {a['tokens_per_s']:.0f} and {b['tokens_per_s']:.0f} tokens/s, "
        f"first step after {a['first_step_s']:.1f} and {b['first_step_s']:.1f} s, losses "
        f"{a['losses'][0]:.4f} to {a['losses'][-1]:.4f}, within {furthest:.0e}",
        soft_wrap=True,
    )
    return a, b


def run_side(side: Sequence[str]) -> dict[str, Any]:
    """Starts a script once per rank and returns the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        command = [sys.executable, str(SIDES / side[0]), *side[1:], folder, str(time.monotonic())]
        ranks = [
            subprocess.Popen(
                command, env=environ | {"RANK": str(i), "LOCAL_RANK": str(i)}, stdout=log, stderr=subprocess.STDOUT
            )
            for i in range(RANKS)
        ]
        try:
            codes: list[int | str] = [rank.wait(TIMEOUT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [f"not over after {TIMEOUT_S:.0f} s"]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            log.seek(0)
            raise SystemExit(f"{log.read()}\n{' '.join(side)} failed: {codes}")
        return json.loads(Path(folder, "result.json").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def time_command(arguments: list[str]) -> float:
    """Wall time of one call of `ds-trainer`, in seconds."""
    began = time.monotonic()
    subprocess.run([Path(sys.executable).with_name("ds-trainer"), *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def ratio(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], key: str, unit: str) -> Ratio:
    return Ratio(name, [a[key] for a, _ in pairs], [b[key] for _, b in pairs], unit)


def table(ratios: list[Ratio]) -> Table:
    out = Table("", "unit", "ours", "peer", "ratio", "quartiles", title=f"medians of {PAIRS} pairs")
    for each in ratios:
        low, middle, high = each.quartiles
        ours, peer = (f"{statistics.median(values):,.1f}" for values in (each.ours, each.peer))
        out.add_row(each.name, each.unit, ours, peer, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    return out


if __name__ == "__main__":
    main()
