"""Cuts every model type of causal language models into stages, and writes what came of each as a table of the docs.

python -m tests.matrix.pp                     all types
python -m tests.matrix.pp --types llama gpt2  these, and no table
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from ds_trainer.planning.checkpoint_spec import families
from tests.helpers.world import RankFailed, World
from tests.matrix.compare import Outcome, worst
from tests.matrix.pp_compare import SIZES, compare_all

TABLE = Path(__file__).parents[2] / "docs" / "pp_matrix.md"
HEAD = """\
# Model types under pipeline parallelism

Written by `make matrix-pp` with transformers {transformers} and torch {torch}. Of each model type a small model with
layers of each kind, head and embedding tied or not, was cut into two stages and into three. It passed where the loss
and every gradient of a step of two micro-batches of different lengths are those of the whole model, and the stages
together hold each of its parameters once, but for copies of tied ones.

"Layers" is the list that is cut. Multipliers and caps that do nothing by default were given other values. A type is
refused where its small model shows that more than hidden states goes from layer to layer, or that there is not one list
of layers that run one after the other; `ds-trainer config check` says so.

| model type | layers | pp 2 | pp 3 | why not |
|---|---|---|---|---|
"""


def main() -> int:
    """Runs the matrix.

    Returns:
        1 where a type has failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.pp")
    parser.add_argument("--types", nargs="*", default=[], metavar="TYPE", help="model types; without, all")
    chosen = parser.parse_args().types
    outcomes = run(chosen or list(families()))
    for name, of_sizes in outcomes.items():
        if worst(of_sizes).verdict != "passed" or chosen:
            verdicts = (f"pp {size} {each.verdict}" for size, each in zip(SIZES, of_sizes, strict=True))
            print(f"{name}: {', '.join(verdicts)} {worst(of_sizes).reason}")
    if not chosen:
        TABLE.write_text(table(outcomes))
    counts = Counter(worst(of_sizes).verdict for of_sizes in outcomes.values())
    print(f"pp matrix: {counts['passed']} passed, {counts['refused']} refused, {counts['failed']} failed")
    return int(counts["failed"] > 0)


def run(types: list[str]) -> dict[str, tuple[Outcome, ...]]:
    """Model type -> what came of it at each number of stages.

    A process for each: one that hangs or crashes takes no other with it, and memory is given back.
    """
    world = World()
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    for name in (bar := tqdm(types, unit="type")):
        bar.set_description(name)
        try:
            outcomes[name] = world(compare_all, 1, [name], timeout_s=120.0)[0][name]
        except RankFailed as error:
            outcomes[name] = (Outcome("failed", str(error).strip().splitlines()[-1]),) * len(SIZES)
    world.close()
    return outcomes


def table(outcomes: dict[str, tuple[Outcome, ...]]) -> str:
    """The page with the table."""
    head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])
    rows = [
        f"| {name} | {_layers(name)} | {' | '.join(each.verdict for each in sizes)} | {worst(sizes).reason} |"
        for name, sizes in sorted(outcomes.items())
    ]
    return head + "\n".join(rows) + "\n"


def _layers(name: str) -> str:
    plan = families()[name].pp_plan
    return "" if plan is None else f"`{plan['layers']}`"


if __name__ == "__main__":
    sys.exit(main())
