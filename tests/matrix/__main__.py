"""Takes every model type with a tensor-parallel plan, and writes what came of each as a table that the docs include.

python -m tests.matrix                     all types
python -m tests.matrix --types llama gpt2  these, and no table
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from ds_trainer.models.extra_tp_plans import OWN_PLANS
from ds_trainer.planning.checkpoint_spec import families
from tests.helpers.world import RankFailed, World
from tests.matrix.compare import Outcome, compare_all, worst

TABLE = Path(__file__).parents[2] / "docs" / "tp_matrix.md"
HEAD = """\
# Model types under tensor parallelism

Written by `make matrix-tp` with transformers {transformers} and torch {torch}. Of each model type with a
[plan](tensor_parallel.md) a small model with one layer of each kind was split over two ranks. It passed where the loss
and every gradient are those of one process, all entries of the plan match something, and each rank holds half of what
the plan cuts.

The plan is that of transformers, one of ds_trainer, or both: entries of ours over theirs. "Held" is the part of the
small model's parameters that a rank holds; what no entry names stays whole.

| model type | plan of | tp 2 | with sequence parallelism | held |
|---|---|---|---|---|
"""


def main() -> int:
    """Runs the matrix.

    Returns:
        1 where a type has failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--types", nargs="*", default=[], metavar="TYPE", help="model types; without, all")
    chosen = parser.parse_args().types
    types = chosen or [name for name, family in families().items() if family.tp_plan]
    outcomes = run(types)
    for name, pair in outcomes.items():
        if worst(pair).verdict != "passed" or chosen:
            print(f"{name}: {pair[0]}; with sequence parallelism {pair[1]}")
    if not chosen:
        TABLE.write_text(table(outcomes))
    counts = Counter(worst(pair).verdict for pair in outcomes.values())
    print(f"tp matrix: {counts['passed']} passed, {counts['refused']} refused, {counts['failed']} failed")
    return int(counts["failed"] > 0)


def run(types: list[str]) -> dict[str, tuple[Outcome, Outcome]]:
    """Model type -> what came of it without and with sequence parallelism.

    One world of two ranks for each: one that hangs or crashes takes no other with it, and memory is given back.
    """
    world = World()
    outcomes = {}
    for name in (bar := tqdm(types, unit="type")):
        bar.set_description(name)
        try:
            outcomes[name] = world(compare_all, 2, [name], timeout_s=120.0)[0][name]
        except RankFailed as error:
            outcomes[name] = (Outcome("failed", str(error).strip().splitlines()[-1]),) * 2
    world.close()
    return outcomes


def table(outcomes: dict[str, tuple[Outcome, Outcome]]) -> str:
    """The page with the table."""
    head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])
    rows = [
        f"| {name} | {_origin(name)} | {plain} | {sequence} | {100 * plain.share:.0f} % |"
        for name, (plain, sequence) in sorted(outcomes.items())
    ]
    return head + "\n".join(rows) + "\n"


def _origin(name: str) -> str:
    own, plan = OWN_PLANS.get(name, {}), families()[name].tp_plan
    if not own:
        return "transformers"
    return "ds_trainer" if len(own) == len(plan) else "both"


if __name__ == "__main__":
    sys.exit(main())
