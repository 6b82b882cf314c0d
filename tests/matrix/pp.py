"""Splits every model type of causal language models into stages.

python -m tests.matrix.pp                     all types, and docs/pp_matrix.md
python -m tests.matrix.pp --types llama gpt2  these, and no page
"""

from __future__ import annotations

import sys

from ds_trainer.planning.checkpoint_spec import families
from tests.matrix.compare import Outcome, worst
from tests.matrix.page import Matrix
from tests.matrix.pp_compare import SIZES, compare_all

HEAD = """\
# Model types under pipeline parallelism

Written by `make matrix-pp` with transformers {transformers} and torch {torch}. Of each model type a small model with
layers of each kind, head and embedding tied or not, was split into two stages and into three. It passed where the loss
and every gradient of a step of two micro-batches of different lengths are those of the full model, and the stages
together hold each of its parameters once, but for replicas of tied ones.

"Layers" is the list that is split. Multipliers and caps that do nothing by default were given other values. A type is
refused where its small model shows that more than hidden states goes from layer to layer, or that there is not one list
of layers that run one after the other; `ds-trainer config check` says so.

| model type | layers | pp 2 | pp 3 | why not |
|---|---|---|---|---|
"""


def _row(name: str, outcomes: tuple[Outcome, ...]) -> str:
    verdicts = " | ".join(each.verdict for each in outcomes)
    return f"| {name} | {_layers(name)} | {verdicts} | {worst(outcomes).reason} |"


def _layers(name: str) -> str:
    plan = families()[name].pp_plan
    return "" if plan is None else f"`{plan['layers']}`"


MATRIX = Matrix("pp", 1, compare_all, tuple(f"pp {size}" for size in SIZES), HEAD, _row)

if __name__ == "__main__":
    sys.exit(MATRIX.main("python -m tests.matrix.pp", list(families())))
