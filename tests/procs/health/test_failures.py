"""Whatever ends one rank ends all of them soon, in words that name it, its step and its samples."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.distributed.process_groups import init_mesh
from ds_trainer.errors import DataError, exit_on_user_error
from ds_trainer.health.expected_wait import expected_wait
from ds_trainer.health.hang import DEFAULTS, Timeouts
from ds_trainer.health.local_peers import PeerAddress
from ds_trainer.launch.rank_grid import Grid
from tests.helpers.failing import due, run_ranks

WHERE = "rank 1, step 3, samples [31, 7]"


def run_steps(at_step_3, stuck_s=20.0, collective_s=1800.0):
    """A guarded loop with one consensus per step, as the trainer's; `at_step_3(mesh)` is the user's code there."""
    mesh, rank = join(Timeouts(stuck_s, collective_s)), int(os.environ["RANK"])
    with exit_on_user_error(), mesh.monitor.guard():
        for step in range(1, 6):
            mesh.monitor.at(f"step {step}", step, [10 * step + rank, 7])
            agree(mesh, f"step {step}")
            if step == 3:
                at_step_3(mesh)


def join(timeouts=DEFAULTS):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return init_mesh(Grid(world, rank, rank, world), "cpu", timeouts)


def on_rank_1(action):
    return on_rank(1, action)


def on_rank(rank, action):
    def act(mesh):
        if mesh.grid.rank == rank:
            due()
            action()

    return act


def boom():
    raise ValueError("boom")


def sleep_for_ever():
    while True:
        time.sleep(1)


def reporters(ended):
    return [rank for rank, end in enumerate(ended) if end.text]


def rank_1_raises():
    run_steps(on_rank_1(boom))


@pytest.mark.case("F8")
def test_an_exception_on_one_rank_ends_all_and_only_its_text_with_step_and_samples_is_written():
    ended = run_ranks(rank_1_raises, 3)
    assert [end.code for end in ended] == [1, 1, 1]
    assert reporters(ended) == [1]
    assert ended[1].text.endswith(f"ValueError: boom\n{WHERE}\n")
    assert max(end.seconds for end in ended) < 15
    assert min(ended[0].seconds, ended[2].seconds) >= ended[1].seconds - 0.1, "the others end after it has spoken"


def rank_1_exits():
    run_steps(on_rank_1(lambda: os._exit(1)))


def rank_1_is_killed():
    run_steps(on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.case("F8")
@pytest.mark.parametrize("die, code", [(rank_1_exits, 1), (rank_1_is_killed, -9)])
def test_one_of_the_survivors_tells_of_a_rank_that_ended_without_a_word(die, code):
    ended = run_ranks(die, 3)
    assert [end.code for end in ended] == [1, code, 1]
    assert len(reporters(ended)) == 1
    (text,) = [end.text for end in ended if end.text]
    assert text.startswith(f"\nerror: {WHERE}: its process ended without a word")
    assert text.count("\n") == 4
    assert max(end.seconds for end in ended) < 15


def rank_0_is_killed():
    def kill():
        time.sleep(0.5)  # Between two looks of the others at the store: torch prints a trace if it breaks under them.
        os.kill(os.getpid(), signal.SIGKILL)

    run_steps(on_rank(0, kill))


@pytest.mark.case("F8")
def test_the_rank_that_holds_the_store_may_be_the_one_that_dies():
    ended = run_ranks(rank_0_is_killed, 3, store="tcp")
    assert [end.code for end in ended] == [-9, 1, 1]
    assert len(reporters(ended)) == 1
    (text,) = [end.text for end in ended if end.text]
    assert text.startswith("\nerror: rank 0, step 3, samples [30, 7]: its process ended without a word")
    assert max(end.seconds for end in ended) < 15


def rank_0_raises():
    run_steps(on_rank(0, boom))


@pytest.mark.slow
def test_the_rank_that_holds_the_store_may_be_the_one_that_raises():
    ended = run_ranks(rank_0_raises, 3, store="tcp")
    assert [end.code for end in ended] == [1, 1, 1]
    assert reporters(ended) == [0]
    assert ended[0].text.endswith("ValueError: boom\nrank 0, step 3, samples [30, 7]\n")
    assert max(end.seconds for end in ended) < 15


def on_machines_of_their_own():
    """Ranks that cannot see one another's processes, as on several nodes."""
    PeerAddress.of_this_process = classmethod(lambda cls, fd: cls(f"machine {os.getpid()}", os.getpid(), fd))


def rank_1_of_another_machine_is_killed():
    on_machines_of_their_own()

    def kill():
        time.sleep(1.5)  # Until it has told where it is.
        due()
        os.kill(os.getpid(), signal.SIGKILL)

    run_steps(on_rank_1(kill))


@pytest.mark.slow
def test_a_rank_of_another_machine_is_known_to_be_dead_when_its_connections_break_and_it_says_no_more():
    ended = run_ranks(rank_1_of_another_machine_is_killed, 2, store="tcp")
    assert [end.code for end in ended] == [1, -9]
    assert ended[0].text.startswith(f"\nerror: {WHERE}: its process ended without a word")
    assert max(end.seconds for end in ended) < 15


def rank_0_of_another_machine_is_killed():
    on_machines_of_their_own()
    rank_0_is_killed()


@pytest.mark.slow
def test_a_dead_machine_that_held_the_store_is_named():
    ended = run_ranks(rank_0_of_another_machine_is_killed, 2, store="tcp")
    assert ended[0].code == -9 and ended[1].code != 0
    assert "rank 0 has ended" in ended[1].text
    assert max(end.seconds for end in ended) < 15


def a_survivor_cannot_notice():
    run_steps(lambda mesh: on_rank_1(lambda: os._exit(1))(mesh) or time.sleep(1000))


def test_survivors_that_are_held_by_something_else_end_as_soon():
    ended = run_ranks(a_survivor_cannot_notice, 2)
    assert [end.code for end in ended] == [1, 1]
    assert f"error: {WHERE}: its process ended without a word" in ended[0].text
    assert max(end.seconds for end in ended) < 15


def rank_1_sleeps():
    run_steps(on_rank_1(sleep_for_ever), stuck_s=2.0)


@pytest.mark.case("F8")
def test_a_rank_that_sleeps_for_ever_ends_all_with_its_stack():
    ended = run_ranks(rank_1_sleeps, 3)
    assert [end.code for end in ended] == [1, 1, 1]
    assert reporters(ended) == [0]
    stack, error = ended[0].text.split("\nerror: ")
    assert "in sleep_for_ever\n    time.sleep(1)" in stack
    assert error.startswith("rank 1 is stuck, nothing computed, read or written for 2 s: " + WHERE)
    assert "in sleep_for_ever() at " in error and "; ranks [0, 2] wait at step 4\n" in error
    assert "run.stuck_timeout_s" in error
    assert 2 < max(end.seconds for end in ended) < 10


def rank_1_sleeps_while_gradients_are_waited_for():
    with join().monitor.guard():  # Made before DDP, which needs the group.
        model = DistributedDataParallel(torch.nn.Linear(4, 4))

    def act(mesh):
        loss = model(torch.ones(2, 4)).sum()
        on_rank_1(lambda: time.sleep(10**6))(mesh)
        loss.backward()

    run_steps(act, stuck_s=2.0)


def test_a_rank_that_waits_for_gradients_inside_backward_is_not_taken_for_the_stuck_one():
    ended = run_ranks(rank_1_sleeps_while_gradients_are_waited_for, 2)
    assert ended[0].text.split("\nerror: ")[1].startswith("rank 1 is stuck")
    assert "; ranks [0] wait at step 3\n" in ended[0].text


def rank_1_is_slow():
    def compute():
        began = time.monotonic()
        while time.monotonic() < began + 2.5:
            sum(range(1000))

    def work():
        compute()
        os.system("timeout 2.5 sh -c 'while :; do :; done'")
        with expected_wait():
            time.sleep(2.5)

    run_steps(on_rank_1(work), stuck_s=1.5)
    if os.environ["RANK"] == "1":
        time.sleep(2.5)
    run_steps(lambda mesh: None, stuck_s=1.5)


@pytest.mark.slow
def test_a_rank_that_computes_itself_or_in_a_child_or_waits_rightly_or_is_between_calls_is_waited_for():
    ended = run_ranks(rank_1_is_slow, 2)
    assert [(end.code, end.text) for end in ended] == [(0, "")] * 2


def rank_1_computes_for_too_long():
    def compute():
        while True:
            sum(range(1000))

    run_steps(on_rank_1(compute), collective_s=2.0)


def test_a_rank_that_never_comes_ends_all_after_the_collective_timeout():
    ended = run_ranks(rank_1_computes_for_too_long, 2)
    assert [end.code for end in ended] == [1, 1]
    error = ended[0].text.split("\nerror: ")[1]
    assert error.startswith(f"ranks [0] have waited 2 s at step 4 for {WHERE}, in compute() at ")
    assert 2 < max(end.seconds for end in ended) < 10


def rank_0_saves_alone():
    def save(mesh):
        if mesh.grid.rank == 0:
            due()
            agree(mesh, "save_model()")

    run_steps(save)


@pytest.mark.case("D6")
def test_a_call_made_on_one_rank_is_named_with_file_and_line_on_every_rank():
    ended = run_ranks(rank_0_saves_alone, 3)
    assert [end.code for end in ended] == [2, 2, 2]
    assert reporters(ended) == [0], "all raise the same: one per node prints it"
    assert ended[0].text.startswith("\nerror: save_model() was entered by ranks [0] only, at ")
    assert "test_failures.py:" in ended[0].text and "; ranks [1, 2] are at step 4 (" in ended[0].text
    assert max(end.seconds for end in ended) < 10


def rank_0_saves_after_the_last_step():
    run_steps(lambda mesh: None)
    if dist.get_rank() == 0:
        due()
        mesh = join()
        with exit_on_user_error(), mesh.monitor.guard():
            agree(mesh, "save_model()")


@pytest.mark.case("D6")
def test_a_call_made_on_one_rank_when_the_others_have_ended_is_named():
    ended = run_ranks(rank_0_saves_after_the_last_step, 2)
    assert [end.code for end in ended] == [2, 0]
    assert ended[0].text.startswith("\nerror: save_model() was entered by ranks [0] only, at ")
    assert "; rank 1 has ended\n" in ended[0].text
    assert max(end.seconds for end in ended) < 10


def rank_1_raises_in_a_save():
    def save(mesh):
        with consensus(mesh, "save_model()"):
            if mesh.grid.rank == 1:
                due()
                boom()

    run_steps(save)


@pytest.mark.case("D6")
def test_an_exception_on_one_rank_during_a_save_ends_all():
    ended = run_ranks(rank_1_raises_in_a_save, 2)
    assert [end.code for end in ended] == [1, 1]
    assert reporters(ended) == [1] and ended[1].text.endswith(f"ValueError: boom\n{WHERE}\n")
    assert max(end.seconds for end in ended) < 15


def one_rank_meets_a_user_error():
    run_steps(on_rank_1(lambda: (_ for _ in ()).throw(DataError("bad", "good", "mend"))))


def test_a_user_error_of_one_rank_is_told_with_step_and_samples():
    ended = run_ranks(one_rank_meets_a_user_error, 2)
    assert [end.code for end in ended] == [1, 2]
    assert reporters(ended) == [1] and ended[1].text.endswith(f"  change: mend\n  {WHERE}\n")


def all_raise_and_go_on():
    mesh = join()
    for attempt in range(3):
        with pytest.raises(ValueError), mesh.monitor.guard():
            agree(mesh, f"attempt {attempt}")
            time.sleep(0.3 * mesh.grid.rank)
            boom()
    time.sleep(2)
    with mesh.monitor.guard():
        agree(mesh, "the end")
        time.sleep(2)


def test_an_exception_that_all_ranks_raise_can_be_caught():
    ended = run_ranks(all_raise_and_go_on, 3)
    assert [(end.code, end.text) for end in ended] == [(0, "")] * 3
