"""All ranks raise the same error, or none does. Ranks are threads here."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, get_ident

import pytest

from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.errors import DataError, DesyncError, MachineError, UserError
from ds_trainer.health.main_thread import MainThread
from ds_trainer.health.monitor import Monitor
from ds_trainer.launch import signals
from ds_trainer.launch.rank_grid import Grid

THIS = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)


class ThreadMesh:
    """The part of a mesh that a consensus needs, over threads of one process."""

    monitor = Monitor(0, MainThread(None))

    def __init__(self, rank, slots, barrier):
        self.grid = Grid(world=len(slots), rank=rank)
        self.slots, self.barrier = slots, barrier

    def gather_over_world(self, value):
        self.slots[self.grid.rank] = pickle.dumps(value)
        self.barrier.wait(5)
        found = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait(5)
        return found

    def sum_over_world(self, *values):
        return [float(sum(column)) for column in zip(*self.gather_over_world(values), strict=True)]


def run_on_ranks(ranks, function):
    """What `function(mesh)` returns or raises on each rank."""
    slots, barrier = [None] * ranks, Barrier(ranks)

    def run(rank):
        try:
            return function(ThreadMesh(rank, slots, barrier))
        except UserError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def on_ranks(*errors):
    """What each rank raises if it meets `errors[rank]` in a block that ends in a consensus."""

    def meet(mesh):
        with consensus(mesh, "a block"):
            if errors[mesh.grid.rank] is not None:
                raise errors[mesh.grid.rank]

    return run_on_ranks(len(errors), meet)


def data_error(text="bad record"):
    return DataError(text, "records are good", "mend it")


def test_nothing_happens_where_no_rank_fails():
    assert on_ranks(None, None, None) == [None, None, None]


def test_every_rank_raises_what_one_rank_met_and_says_which():
    raised = on_ranks(None, data_error(), None)
    for error in raised:
        assert isinstance(error, DataError) and error.on_all_ranks
        assert str(error).startswith("on rank 1: bad record\n  rule:   records are good")


def test_the_lowest_rank_is_heard_where_several_fail():
    raised = on_ranks(None, MachineError("no disk", "disk", "buy"), data_error())
    assert [type(error) for error in raised] == [MachineError] * 3
    assert all(str(error).startswith("on rank 1: no disk") for error in raised)


def test_what_all_ranks_met_is_of_no_rank_in_particular():
    for error in on_ranks(data_error(), data_error()):
        assert error.on_all_ranks and str(error).startswith("bad record")


def test_other_exceptions_are_not_caught():
    with pytest.raises(ZeroDivisionError), consensus(None, "a block"):
        raise ZeroDivisionError


def test_numbers_are_summed_on_the_way():
    outcomes = run_on_ranks(3, lambda mesh: agree(mesh, "step 1", mesh.grid.rank, 0.5))
    assert [(outcome.sums, outcome.stop) for outcome in outcomes] == [((3.0, 1.5), False)] * 3


def test_numbers_known_at_the_end_of_a_block_are_summed_too():
    def meet(mesh):
        with consensus(mesh, "a block") as outcome:
            outcome.values = [mesh.grid.rank]
        return outcome.sums

    assert run_on_ranks(2, meet) == [(1.0,)] * 2


@pytest.mark.case("F10")
def test_a_signal_that_reached_one_rank_is_known_to_all(monkeypatch):
    asked = {1}
    at_rank = {}

    def meet(mesh):
        at_rank[get_ident()] = mesh.grid.rank
        return agree(mesh, "step 1").stop

    monkeypatch.setattr(signals, "pending", lambda: at_rank[get_ident()] in asked)
    assert run_on_ranks(3, meet) == [True] * 3


@pytest.mark.case("D6")
def test_ranks_at_different_places_are_named_with_who_brought_them_there():
    def save(mesh):
        agree(mesh, "save_model()")

    def step(mesh):
        agree(mesh, "step 4")

    for error in run_on_ranks(3, lambda mesh: save(mesh) if mesh.grid.rank == 2 else step(mesh)):
        assert isinstance(error, DesyncError) and error.on_all_ranks
        line = save.__code__.co_firstlineno + 1
        assert error.found.startswith(f"save_model() was entered by ranks [2] only, at {THIS}:{line}; ")
        line = step.__code__.co_firstlineno + 1
        assert error.found.endswith(f"; ranks [0, 1] are at step 4 ({THIS}:{line})")


def test_of_two_ranks_apart_the_call_is_named_and_not_the_step():
    raised = run_on_ranks(2, lambda mesh: agree(mesh, ("step 4", "evaluate()")[mesh.grid.rank]))
    assert all(error.found.startswith("evaluate() was entered by ranks [1] only") for error in raised)


def test_an_error_is_heard_even_where_ranks_are_apart():
    def meet(mesh):
        with consensus(mesh, f"place {mesh.grid.rank}"):
            if mesh.grid.rank == 1:
                raise data_error()

    assert [type(error) for error in run_on_ranks(2, meet)] == [DataError] * 2


def test_places_of_thousands_of_ranks_are_told_apart():
    """As float64 sums, in which rounding could hide one rank that is elsewhere."""
    world, here, there = 4096, 2**20 - 1, 2**20 - 2
    tags = [here] * (world - 1) + [there]
    assert world * int(float(sum(t * t for t in tags))) != int(float(sum(tags))) ** 2
