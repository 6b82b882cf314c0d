"""Ranks that share one copy of a model, by tensors or in stages, read the same samples; others read others."""

from __future__ import annotations

import pytest

from ds_trainer.errors import DataError
from tests.helpers.runs import D8, collate, make_trainer
from tests.helpers.tiny import samples

SAMPLES = 64
PLACES = {"tp": [(0, 0), (0, 1), (1, 0), (1, 1)], "pp": [(0, 0), (1, 0), (0, 1), (1, 1)]}
"""Of each of four ranks, its data-parallel rank and its rank on the other axis of two."""


def read_an_epoch(out, axis):
    """Steps, the samples this rank computed on, its place, and the learning rate after the last step."""
    seen = []

    def logged(features):
        seen.extend(feature["index"] for feature in features)
        return collate([{"input_ids": feature["input_ids"], "labels": feature["labels"]} for feature in features])

    trainer = make_trainer(
        "ddp",
        out,
        rows=[row | {"index": i} for i, row in enumerate(samples(SAMPLES))],
        given={"data_collator": logged},
        parallel={"engine": "ddp", axis: 2},
        batch={"global_size": None, "micro_size": 2, "accumulation": 2},
        data={"shuffle": True},
        schedule={"name": "linear"},
        run={"max_steps": None, "epochs": 1},
    )
    del seen[:]  # Samples that set-up has probed.
    trainer.train()
    grid = trainer.run.mesh.grid
    place = grid.dp_rank, getattr(grid, f"{axis}_rank")
    return trainer.state.global_step, seen, place, trainer.engine.param_groups()[0]["lr"]


@pytest.mark.case("A4")
@pytest.mark.parametrize("axis", PLACES)
def test_an_epoch_counts_data_ranks_and_each_sees_its_own_samples(world, tmp_path, axis):
    everyone = world(read_an_epoch, 4, tmp_path, axis)
    assert [place for _, _, place, _ in everyone] == PLACES[axis]
    assert all(steps == SAMPLES // (2 * 2 * 2) and lr == 0.0 for steps, *_, lr in everyone)
    data_parallel_view = [[seen for _, seen, place, _ in everyone if place[0] == data] for data in (0, 1)]
    assert all(len(copies) == 2 and copies[0] == copies[1] for copies in data_parallel_view)
    assert sorted(data_parallel_view[0][0] + data_parallel_view[1][0]) == list(range(SAMPLES))


class DrawnAnew:
    """Samples that depend on the rank that reads them, from the third one on, which set-up does not probe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict:
        ids = list(D8[i % 8]["input_ids"])
        if i in (2, 3):
            ids[1] = 3 + self.rank
        return {"input_ids": ids, "labels": ids}


def train_on_other_samples(out, axis, global_size):
    import torch.distributed as dist

    batch = {"global_size": global_size, "micro_size": 1}
    trainer = make_trainer("ddp", out, rows=DrawnAnew(dist.get_rank()), parallel={axis: 2}, batch=batch)
    try:
        trainer.train()
    except DataError as error:
        return str(error)
    return None


@pytest.mark.case("I5")
@pytest.mark.parametrize(("axis", "ranks", "global_size"), [("tp", 4, 4), ("pp", 2, 8)])
def test_ranks_of_one_copy_that_draw_other_samples_are_stopped_with_both_hashes(
    world, tmp_path, axis, ranks, global_size
):
    texts = world(train_on_other_samples, ranks, tmp_path, axis, global_size)
    assert len(set(texts)) == 1
    assert "step 1: ranks that share one copy of the model hold different samples (rank" in texts[0]
    assert texts[0].count("hash") == 2
