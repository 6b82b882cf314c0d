"""Kills small runs at random moments, many of them in the middle of a save; none may lose or repeat anything.

python -m tests.kill_test --runs 30 --seed 7
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from tests.helpers.killing import RANKS, Kill, KilledRun, Moment, check_same, write_model
from tests.helpers.layouts import CELLS

ENGINES = ("ddp", "zero1", "zero2", "zero2-cpu", "zero3", "fsdp2")
EVENTS = ("save", "resume", "step", "save", "commit", "save")
"""In turn; no run begins with "resume", which needs a checkpoint."""
PER_RUN = 3
FOUND = ("save", "commit", "resume", "step")


def kill_runs(folder: Path, engines: Sequence[str], num_kills: int, seed: int, quiet: bool = False) -> list[Kill]:
    """Kills runs, three times each, lets them end, and holds each one to a run on its engine that was never killed.

    Args:
        folder: An empty folder.
        engines: Keys of `CELLS`, in turn.
        num_kills: How many kills.
        seed: Of the moments and the victims; the machine's own timing adds to them.
        quiet: Whether no progress bar is shown.
    """
    rng = random.Random(seed)
    model = write_model(folder / "model")
    straight: dict[str, KilledRun] = {}
    kills: list[Kill] = []
    with tqdm(total=num_kills, unit="kill", disable=quiet) as bar:
        while len(kills) < num_kills:
            number = len(kills) // PER_RUN
            engine = engines[number % len(engines)]
            bar.set_description(engine)
            if engine not in straight:
                straight[engine] = KilledRun(folder / f"straight-{engine}", model, engine, CELLS[engine])
                straight[engine].finish()
            run = KilledRun(folder / f"run-{number}", model, engine, CELLS[engine])
            for _ in range(min(PER_RUN, num_kills - len(kills))):
                kills.append(run.kill(_moment(EVENTS[len(kills) % len(EVENTS)], rng), straight[engine].usual()))
                bar.update()
            run.finish()
            check_same(run, straight[engine])
            shutil.rmtree(run.out)
    return kills


def _moment(event: str, rng: random.Random) -> Moment:
    victims = rng.choice([*((rank,) for rank in range(RANKS)), tuple(range(RANKS))])
    return Moment(event, rng.randint(1, 4), rng.random(), rng.random(), victims)


def report(kills: list[Kill]) -> str:
    """A table of what the runs were doing when they were killed, per engine."""
    lines = [f"{'killed during':12}" + "".join(f"{found:>8}" for found in FOUND) + "   the other rank ended after"]
    for engine in dict.fromkeys(kill.engine for kill in kills):
        own = [kill for kill in kills if kill.engine == engine]
        counts = "".join(f"{sum(kill.found == found for kill in own):8}" for found in FOUND)
        lines.append(f"{engine:12}{counts}   at most {longest_end_s(own):.1f} s")
    return "\n".join(lines)


def longest_end_s(kills: list[Kill]) -> float:
    """The longest that a rank took to end after the other one was killed; 0 where all were killed each time."""
    return max((kill.survivor_s for kill in kills if kill.survivor_s is not None), default=0.0)


def num_in_save(kills: list[Kill]) -> int:
    """How many kills came while a checkpoint was being written."""
    return sum(kill.found == "save" for kill in kills)


def main() -> None:
    """Kills as many runs as the command line says, and prints what happened."""
    parser = argparse.ArgumentParser(description="Kill small runs at random moments.")
    parser.add_argument("--runs", type=int, default=30, help="number of kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of the moments (default: random)")
    args = parser.parse_args()
    print(f"seed: {args.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kill-test-"))  # Kept when it fails.
    kills = kill_runs(folder, ENGINES, args.runs, args.seed)
    shutil.rmtree(folder)
    print(report(kills))
    print(f"killed during a save: {num_in_save(kills)} of {len(kills)}")
    assert num_in_save(kills) >= len(kills) / 4, "too few kills came during a save"
    print(f"longest end of a rank after the other was killed: {longest_end_s(kills):.1f} s")
    print(f"kills: {len(kills)} survived: {len(kills)}")


if __name__ == "__main__":
    main()
