"""What follows from the reports of all ranks: a run that stands still, ranks that never come, or nothing."""

import pytest

from ds_trainer.health.hang import Timeouts, find_hang
from ds_trainer.health.status import RankPosition, Status, sample_text

LIMITS = Timeouts(stuck_s=20.0, collective_s=600.0)


def status(step=4, idle_s=30.0, waits=False, expected_wait=False, guard_depth=1, waiting_at=""):
    here = RankPosition(f"step {step}", step, "samples [3, 7]", guard_depth, waiting_at)
    return Status(1, here, idle_s, waits, expected_wait, "f() at train.py:31", "  File train.py\n")


WAITING = status(waits=True, waiting_at="step 5")


def test_a_report_survives_its_way_as_text():
    assert Status.from_json(status().to_json()) == status()
    assert RankPosition.from_json(status().position.to_json()) == status().position


@pytest.mark.case("F8")
def test_the_rank_that_others_wait_for_is_the_stuck_one():
    hang = find_hang({0: WAITING, 1: status(), 2: WAITING}, LIMITS)
    assert hang.error.found == (
        "rank 1 is stuck, nothing computed, read or written for 20 s: rank 1, step 4, samples [3, 7], "
        "in f() at train.py:31; ranks [0, 2] wait at step 5"
    )
    assert hang.stacks == "rank 1:\n  File train.py\n"


def test_where_all_wait_in_collectives_all_are_named():
    hang = find_hang({0: WAITING, 1: status(waits=True)}, LIMITS)
    assert hang.error.found.startswith("ranks [0, 1] are stuck, ")


@pytest.mark.parametrize(
    "other",
    [status(idle_s=19.0), status(expected_wait=True), status(guard_depth=0)],
    ids=["works", "may stand still", "is between the trainer's calls"],
)
def test_nothing_is_wrong_as_long_as_one_rank(other):
    assert find_hang({0: WAITING, 1: other}, LIMITS) is None


def test_a_rank_that_works_on_and_never_comes_is_named_after_the_collective_timeout():
    late = status(idle_s=0.0)
    assert find_hang({0: status(idle_s=599.0, waits=True), 1: late}, LIMITS) is None
    hang = find_hang({0: status(idle_s=600.0, waits=True), 1: late}, LIMITS)
    assert hang.error.found == (
        "ranks [0] have waited 600 s at step 4 for rank 1, step 4, samples [3, 7], in f() at train.py:31"
    )


@pytest.mark.parametrize(
    "here, words",
    [
        (RankPosition(), "rank 1, set-up"),
        (RankPosition("step 4", 4, "samples [3, 7]"), "rank 1, step 4, samples [3, 7]"),
        (RankPosition("save_model()", 4), "rank 1, save_model(), step 4"),
    ],
)
def test_where_a_rank_is_in_words(here, words):
    assert here.of(1) == words


def test_of_many_samples_the_first_are_named():
    assert sample_text([]) == ""
    assert sample_text(range(100)).startswith("samples [0, 1, 2, ") and "15, ... 100 in all]" in sample_text(range(100))
