"""All ranks raise the same error, or none does. Ranks are threads here."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from ds_trainer.errors import DataError, MachineError
from ds_trainer.mesh.agree import agreed
from ds_trainer.mesh.grid import Grid


class ThreadMesh:
    """The part of a mesh that agreement needs, over threads of one process."""

    def __init__(self, rank, slots, barrier):
        self.grid = Grid(world=len(slots), rank=rank)
        self.slots, self.barrier = slots, barrier

    def gather_objects(self, value):
        self.slots[self.grid.rank] = pickle.dumps(value)
        self.barrier.wait(5)
        found = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait(5)
        return found

    def sum(self, *values):
        return [float(sum(column)) for column in zip(*self.gather_objects(values), strict=True)]


def on_ranks(*errors):
    """What each rank raises if it meets `errors[rank]` in an agreed block."""
    slots, barrier = [None] * len(errors), Barrier(len(errors))

    def run(rank):
        try:
            with agreed(ThreadMesh(rank, slots, barrier)):
                if errors[rank] is not None:
                    raise errors[rank]
        except (DataError, MachineError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(errors)) as pool:
        return list(pool.map(run, range(len(errors))))


def data_error(text="bad record"):
    return DataError(text, "records are good", "mend it")


def test_nothing_happens_where_no_rank_fails():
    assert on_ranks(None, None, None) == [None, None, None]


def test_every_rank_raises_what_one_rank_met_and_says_which():
    raised = on_ranks(None, data_error(), None)
    for error in raised:
        assert isinstance(error, DataError) and error.agreed
        assert str(error).startswith("on rank 1: bad record\n  rule:   records are good")


def test_the_lowest_rank_is_heard_where_several_fail():
    raised = on_ranks(None, MachineError("no disk", "disk", "buy"), data_error())
    assert [type(error) for error in raised] == [MachineError] * 3
    assert all(str(error).startswith("on rank 1: no disk") for error in raised)


def test_what_all_ranks_met_is_of_no_rank_in_particular():
    for error in on_ranks(data_error(), data_error()):
        assert error.agreed and str(error).startswith("bad record")


def test_other_exceptions_are_not_caught():
    with pytest.raises(ZeroDivisionError), agreed(None):
        raise ZeroDivisionError
