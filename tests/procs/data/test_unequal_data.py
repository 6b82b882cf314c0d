"""Data that does not come out even: refused where ranks hold different sets, exact where a set is small."""

import multiprocessing
import random
import time
from functools import partial

import numpy as np
import pytest
import torch

from ds_trainer.data.consistency import check_same_dataset
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.distributed.process_groups import init_mesh
from ds_trainer.errors import DataError
from ds_trainer.launch.rank_grid import Grid
from tests.helpers.runs import D8, collate, make_trainer
from tests.helpers.tiny import oracle, tiny_llama


class Augmented:
    """Samples with noise from the global generators, or from one of the rank's own."""

    def __init__(self, rank, own):
        self.generator = np.random.default_rng(rank) if own else None

    def __len__(self):
        return 7

    def __getitem__(self, i):
        noise = self.generator.integers(1000) if self.generator else random.randrange(1000)
        return {"input_ids": [i, int(noise)], "labels": [i, i]}


class Unreadable:
    """The rank's last sample is broken."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 7

    def __getitem__(self, i):
        if self.rank == 1 and i == 6:
            raise DataError("the file of sample 6 is empty", "files hold a picture", "fix the file")
        return {"input_ids": [i], "labels": [i]}


def rows(n, first=3):
    return [{"input_ids": [first + i, 4], "labels": [first + i, 4]} for i in range(n)]


def pictures(rank):
    """Equal labels; pixels and floats that differ in their last places, as on another machine."""
    return [
        {"pixels": torch.full((2, 2), rank, dtype=torch.uint8), "mean": 0.1 + 1e-9 * rank, "labels": torch.tensor([i])}
        for i in range(7)
    ]


MADE = {
    "equal": lambda rank: rows(7),
    "lengths": lambda rank: rows(7 if rank == 0 else 5),
    "missing": lambda rank: rows(7) if rank == 0 else None,
    "split by rank": lambda rank: rows(7, first=3 + 7 * rank),
    "augmented": partial(Augmented, own=False),
    "augmented apart": partial(Augmented, own=True),
    "pictures": pictures,
    "objects": lambda rank: [{"labels": object()}] * 7,
    "unreadable": Unreadable,
}
REFUSED = {
    "lengths": "the samples of data.train are 7 on rank 0, 5 on rank 1\n  rule:   every rank holds the same data set",
    "missing": "the samples of data.train are 7 on rank 0, none on rank 1\n",
    "split by rank": "data.train holds other samples on ranks [1] than on rank 0\n",
    "unreadable": "on rank 1: the file of sample 6 is empty\n",
}


@pytest.mark.case("F1")
def test_ranks_with_different_data_sets_are_refused_on_all_and_equal_ones_are_not(world):
    first, second = world(look_at_all, 2)
    assert first == second
    outcomes, seconds = first[0], first[1]
    assert outcomes.keys() == MADE.keys()
    for name, text in outcomes.items():
        assert text.startswith(REFUSED[name]) if name in REFUSED else text == "", name
    assert seconds == "under 5"


def look_at_all():
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    mesh = init_mesh(Grid(2, rank, rank, 2), "cpu")
    outcomes, began = {}, time.monotonic()
    for name, make in MADE.items():
        before = random.getstate(), torch.get_rng_state()
        outcomes[name] = refusal(make(rank), mesh)
        assert before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())
    return outcomes, "under 5" if time.monotonic() - began < 5 else "too slow"


def refusal(dataset, mesh):
    sampler = GlobalBatchSampler(len(dataset), 4, 2, mesh.grid.rank, 2) if dataset is not None else None
    loader = BatchLoader(dataset, sampler, collate, seed=5) if dataset is not None else None
    try:
        check_same_dataset(loader, mesh, "train")
    except DataError as error:
        assert error.on_all_ranks
        return str(error)
    return ""


@pytest.mark.case("F1")
@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_sets_smaller_than_one_round_of_the_ranks_are_evaluated_exactly(world, tmp_path, engine):
    for losses in world(evaluate_small_sets, 2, engine, tmp_path):
        for n, found in losses.items():
            assert found == [pytest.approx(oracle(tiny_llama(), D8[:n])[0], rel=1e-6)] * 2
            assert found[0] == found[1]


def evaluate_small_sets(engine, out):
    multiprocessing.current_process().daemon = False  # A daemon may have no children.
    losses = {3: [], 1: []}
    for num_workers in (0, 2):
        trainer = make_trainer(engine, out, given={"eval_dataset": D8}, data={"num_workers": num_workers})
        for n, found in losses.items():
            found.append(trainer.predict(D8[:n]).metrics["test_loss"])
        assert not multiprocessing.active_children()
        trainer.close()
    return losses
