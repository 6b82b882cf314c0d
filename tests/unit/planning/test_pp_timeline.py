"""A schedule in time: its bubble, and how many micro-batches are in flight."""

import pytest

from ds_trainer.planning.pp_schedules import NAMES, Kind, default_virtual_stages, make_schedule, schedule_problem
from ds_trainer.planning.pp_timeline import Timeline, simulate
from tests.helpers.table import table


def timeline(name: str, ranks: int, microbatches: int, **times) -> Timeline:
    return simulate(make_schedule(name, ranks, default_virtual_stages(name), microbatches), **times)


SIZES = [(2, 2), (2, 7), (3, 9), (4, 4), (4, 8), (4, 16), (8, 8), (8, 32)]


@table(("ranks", "microbatches"), SIZES)
@table("name", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_formula(name, ranks, microbatches):
    for times in ({}, {"forward": 3, "input": 1, "weight": 5}):
        found = timeline(name, ranks, microbatches, **times)
        assert found.idle == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)
        assert found.length == pytest.approx((microbatches + ranks - 1) * (sum(times.values()) or 3))


@table(("ranks", "microbatches"), [size for size in SIZES if size[1] % size[0] == 0])
def test_stages_in_turn_divide_the_bubble(ranks, microbatches):
    for virtual_stages in (2, 3, 4):
        found = simulate(make_schedule("interleaved_1f1b", ranks, virtual_stages, microbatches))
        assert found.idle == pytest.approx((ranks - 1) / (virtual_stages * microbatches + ranks - 1), abs=1e-12)
        assert found.idle < timeline("1f1b", ranks, microbatches).idle


@table("name", ["zbv", "dualpipev", "interleaved_zero_bubble"])
@table("ranks", [2, 3, 4, 8])
def test_zero_bubble_schedules_leave_at_most_a_third_of_the_bubble(name, ranks):
    for microbatches in (2 * ranks, 3 * ranks, 8 * ranks):
        found = timeline(name, ranks, microbatches)
        assert found.idle <= timeline("1f1b", ranks, microbatches).idle / 3


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_with_equal_times_zero_bubble_schedules_are_idle_only_until_a_rank_begins_or_after_it_has_ended(ranks):
    for name, stages, microbatches in (
        ("zbv", 2, 2 * ranks - 1),
        ("zbv", 2, 3 * ranks),
        ("dualpipev", 2, 2 * ranks),
        ("dualpipev", 2, 3 * ranks + 1),
        ("interleaved_zero_bubble", 2, ranks),
        ("interleaved_zero_bubble", 4, 3 * ranks),
    ):
        found = simulate(make_schedule(name, ranks, stages, microbatches))
        assert found.idle == pytest.approx((ranks - 1) / (3 * stages * microbatches + ranks - 1), abs=1e-12), name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_with_equal_times_no_rank_of_zbv_is_idle_between_its_first_pass_and_its_last(ranks):
    for row in timeline("zbv", ranks, 3 * ranks).spans:
        assert all(before.end == after.start for before, after in zip(row, row[1:], strict=False))


@table(("ranks", "microbatches"), SIZES)
def test_as_many_micro_batches_are_in_flight_as_each_schedule_promises(ranks, microbatches):
    assert timeline("gpipe", ranks, microbatches).peak_in_flight == (microbatches,) * ranks
    assert timeline("1f1b", ranks, microbatches).peak_in_flight == tuple(
        min(ranks - rank, microbatches) for rank in range(ranks)
    )
    if microbatches % ranks == 0:
        most = min((3 * ranks - 1) / 2, microbatches)
        assert max(timeline("interleaved_1f1b", ranks, microbatches).peak_microbatches) == most
    for name, most in (("interleaved_zero_bubble", ranks), ("zbv", ranks), ("dualpipev", ranks + 0.5)):
        if schedule_problem(name, ranks, 2, microbatches) is None:
            assert max(timeline(name, ranks, microbatches).peak_microbatches) <= most


def test_an_activation_is_held_until_the_gradients_of_parameters_are_there():
    found = timeline("interleaved_zero_bubble", 4, 8)
    assert found.peak_in_flight == (8, 8, 8, 8)
    held, most = set(), 0
    for span in found.spans[3]:
        where = (span.action.stage, span.action.microbatch)
        if span.action.kind is Kind.FORWARD:
            held.add(where)
        elif span.action.kind is Kind.WEIGHT:
            held.remove(where)
        most = max(most, len(held))
    assert most == found.peak_in_flight[3]


def test_fewer_micro_batches_than_ranks_take_no_longer_than_they_must():
    assert timeline("1f1b", 4, 2).length == (2 + 4 - 1) * 3
    assert timeline("gpipe", 4, 1).length == 4 * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_begins_when_its_input_is_there_and_the_rank_is_free_and_not_later(name):
    found = timeline(name, 4, 8, forward=2, input=3, weight=1)
    ends = {(s.action.kind, s.action.stage, s.action.microbatch): s.end for row in found.spans for s in row}
    last = found.schedule.num_stages - 1
    for row in found.spans:
        free = 0.0
        for span in row:
            kind, stage, microbatch = span.action.kind, span.action.stage, span.action.microbatch
            there = 0.0
            if kind is Kind.FORWARD and stage > 0:
                there = ends[Kind.FORWARD, stage - 1, microbatch]
            elif kind in (Kind.BACKWARD, Kind.INPUT) and stage < last:
                of = [ends.get((k, stage + 1, microbatch)) for k in (Kind.BACKWARD, Kind.INPUT)]
                there = next(end for end in of if end is not None)
            assert span.start == max(free, there)
            free = span.end


def test_the_slowest_stage_sets_the_pace():
    found = timeline("1f1b", 4, 64, stage_costs=(1, 1, 2, 1))
    assert found.idle_of_ranks[2] < 0.1
    assert all(0.45 < found.idle_of_ranks[rank] < 0.55 for rank in (0, 1, 3))
    assert found.length == pytest.approx(64 * 3 * 2, rel=0.1)
