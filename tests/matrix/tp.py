"""Splits every model type with a tensor-parallel plan.

python -m tests.matrix.tp                     all types, and docs/tp_matrix.md
python -m tests.matrix.tp --types llama gpt2  these, and no page
"""

from __future__ import annotations

import sys

from ds_trainer.models.extra_tp_plans import EXTRA_TP_PLANS
from ds_trainer.planning.checkpoint_spec import families
from tests.matrix.compare import Outcome, compare_all
from tests.matrix.page import Matrix

HEAD = """\
# Model types under tensor parallelism

Written by `make matrix-tp` with transformers {transformers} and torch {torch}. Of each model type with a
[plan](tensor_parallel.md) a small model with one layer of each kind was split over two ranks. It passed where the loss
and every gradient are those of one process, all entries of the plan match something, and each rank holds half of what
the plan shards.

The plan is that of transformers, one of ds_trainer, or both: entries of ours over theirs. "Held" is the part of the
small model's parameters that a rank holds; what no entry names is not sharded.

| model type | plan of | tp 2 | with sequence parallelism | held |
|---|---|---|---|---|
"""


def types() -> list[str]:
    """Model types with a plan."""
    return [name for name, family in families().items() if family.tp_plan]


def _row(name: str, outcomes: tuple[Outcome, ...]) -> str:
    plain, sequence = outcomes
    return f"| {name} | {_origin(name)} | {plain} | {sequence} | {100 * plain.share:.0f} % |"


def _origin(name: str) -> str:
    own, plan = EXTRA_TP_PLANS.get(name, {}), families()[name].tp_plan
    if not own:
        return "transformers"
    return "ds_trainer" if len(own) == len(plan) else "both"


MATRIX = Matrix("tp", 2, compare_all, ("tp 2", "with sequence parallelism"), HEAD, _row)

if __name__ == "__main__":
    sys.exit(MATRIX.main("python -m tests.matrix.tp", types()))
