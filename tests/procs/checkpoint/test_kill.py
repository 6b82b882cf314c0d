"""Runs killed at random moments, a few of those that `make kill-test` makes."""

import pytest

from tests.helpers.killing import SURVIVOR_S
from tests.kill_test import kill_runs, longest_end_s, num_in_save, report


@pytest.mark.case("D7")
@pytest.mark.slow
@pytest.mark.parametrize("engines", [("ddp", "zero3"), ("fsdp2",)], ids="-".join)
def test_runs_killed_while_saving_resuming_and_training_lose_and_repeat_nothing(tmp_path, engines):
    kills = kill_runs(tmp_path, engines, num_kills=6, seed=7, quiet=True)
    print(f"\n{report(kills)}")
    assert {kill.found for kill in kills} >= {"save", "resume"}
    assert num_in_save(kills) >= 2
    assert longest_end_s(kills) < SURVIVOR_S
