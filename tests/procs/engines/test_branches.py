"""Ranks that run different modules of the model train what one process would."""

from __future__ import annotations

import pytest

from tests.helpers.branches import branches, expected, rows
from tests.helpers.runs import largest_difference, make_trainer, weights
from tests.helpers.tiers import tiers

STEPS = {
    "each its own": [4, 5, 6, 7, 5, 4, 7, 6],
    "one on one rank only": [4, 4, 6, 5, 4, 5, 4, 4],
}
"""First tokens of the samples of two steps: the ranks take them in turn."""
BUCKETS = {"zero": {"reduce_bucket_size": 3000}}
LAYOUTS = {
    "zero0": ("zero0", {}),
    "zero1": ("zero1", BUCKETS),
    "zero2": ("zero2", BUCKETS),
    "zero2-overlap": ("zero2", {"zero": {"overlap_comm": True}}),
}


def train(engine: str, out, tokens: list[int], accumulation: int, sections: dict) -> tuple[list[float], float]:
    """Losses of two steps, and the largest difference of the weights after them."""
    data = rows(*tokens)[: 4 * accumulation]
    steps = [data[: 2 * accumulation], data[2 * accumulation :]]
    losses, right = expected(steps)
    trainer = make_trainer(
        engine,
        out,
        model=branches(),
        rows=data,
        batch={"global_size": 2 * accumulation, "micro_size": 1},
        run={"max_steps": 2},
        optimizer={"lr": 1.0},
        logging={"every_steps": 1},
        **sections,
    )
    trainer.train()
    got = [entry.loss for entry in trainer.state.log_history if hasattr(entry, "loss")]
    difference = largest_difference(weights(trainer), right)
    trainer.close()
    return [abs(a - b) for a, b in zip(got, losses, strict=True)], difference


def all_cells(engine: str, out, sections: dict) -> dict:
    """Every case and number of micro-batches, in one world."""
    return {
        (case, accumulation): train(engine, out / f"{case}-{accumulation}", tokens, accumulation, sections)
        for case, tokens in STEPS.items()
        for accumulation in (1, 2)
    }


@pytest.mark.case("K1")
@pytest.mark.parametrize("layout", tiers(LAYOUTS, quick=["zero2"]))
def test_ranks_that_run_different_modules_train_what_one_process_does(world, tmp_path, layout):
    engine, sections = LAYOUTS[layout]
    for cells in world(all_cells, 2, engine, tmp_path, sections):
        for cell, (losses, difference) in cells.items():
            assert max(losses) < 1e-5, cell
            assert difference < 1e-5, cell
