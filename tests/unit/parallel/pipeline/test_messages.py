"""Messages between the ranks of a pipeline: their order, and that no step hangs, however ranks wait for each other."""

from collections import defaultdict
from functools import cache

import pytest

from ds_trainer.parallel.pipeline.messages import Message, Receive, Send, with_messages
from ds_trainer.planning.pp_schedules import (
    NAMES,
    Action,
    Kind,
    Schedule,
    accepts,
    default_virtual_stages,
    forward_only,
    make_schedule,
)
from ds_trainer.planning.pp_timeline import simulate

operations_of = cache(with_messages)


@cache
def schedules(name: str) -> list[Schedule]:
    found = []
    for ranks in range(2, 9):
        for microbatches in (1, 2, ranks, 2 * ranks - 1, 3 * ranks, 32):
            for virtual_stages in (1, 2, 3):
                if accepts(name, ranks, virtual_stages, microbatches):
                    found.append(make_schedule(name, ranks, virtual_stages, microbatches))
            found.append(forward_only(name, ranks, default_virtual_stages(name), microbatches))
    return found


def label(message: Message) -> tuple[str, int, int]:
    return message.kind, message.stage, message.microbatch


def read_and_made(schedule: Schedule, action: Action) -> tuple[tuple | None, tuple | None]:
    """What an action reads of another rank's, and what it makes for one; written here from the meaning of a pass."""
    first, last = 0, schedule.num_stages - 1
    stage, microbatch, here = action.stage, action.microbatch, schedule.rank_of(action.stage)
    if action.kind is Kind.FORWARD:
        read = None if stage == first else ("hidden", stage, microbatch, stage - 1)
        made = None if stage == last else ("hidden", stage + 1, microbatch, stage + 1)
    elif action.kind in (Kind.BACKWARD, Kind.INPUT):
        read = None if stage == last else ("gradient", stage, microbatch, stage + 1)
        made = None if stage == first else ("gradient", stage - 1, microbatch, stage - 1)
    else:
        read = made = None
    return tuple(None if x is None or schedule.rank_of(x[3]) == here else x[:3] for x in (read, made))


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_sent_after_the_pass_that_makes_it_and_awaited_before_the_one_that_reads_it(name):
    for schedule in schedules(name):
        for rank, operations in enumerate(operations_of(schedule)):
            assert tuple(o for o in operations if isinstance(o, Action)) == schedule.actions[rank]
            made, awaited = set(), set()
            for operation in operations:
                if isinstance(operation, Send):
                    made.remove(label(operation))
                elif isinstance(operation, Receive):
                    awaited.add(label(operation))
                else:
                    read, makes = read_and_made(schedule, operation)
                    if read:
                        awaited.remove(read)
                    if makes:
                        made.add(makes)
            assert not made and not awaited


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_issue_their_messages_in_the_same_order(name):
    for schedule in schedules(name):
        between = defaultdict(list)
        for rank, operations in enumerate(operations_of(schedule)):
            for operation in operations:
                if isinstance(operation, Message):
                    assert operation.peer != rank
                    between[rank, operation.peer].append((label(operation), isinstance(operation, Send)))
        for (rank, peer), issued in between.items():
            assert issued == [(message, not is_send) for message, is_send in between[peer, rank]]


@pytest.mark.parametrize("name", NAMES)
def test_a_receiver_waits_already_when_a_message_is_sent(name):
    for schedule in schedules(name):
        ends = {span.action: span.end for row in simulate(schedule).spans for span in row}
        sent, posted = {}, {}
        for operations in operations_of(schedule):
            now = 0.0
            for operation in operations:
                if isinstance(operation, Action):
                    now = ends[operation]
                else:
                    (sent if isinstance(operation, Send) else posted)[label(operation)] = now
        assert sent.keys() == posted.keys()
        assert all(posted[message] <= sent[message] for message in sent)


def hangs(rows) -> bool:
    """Whether lists do not end if a send waits for its receive and a receive for its send: the most they can wait."""
    left = [list(reversed(row)) for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row and not (isinstance(row[-1], Message) and not is_met(left, rank)):
                if isinstance(row[-1], Message):
                    left[row[-1].peer].pop()
                row.pop()
                moved = True
    return any(left)


def is_met(left, rank: int) -> bool:
    """Whether the rank at the other end of a rank's next message has come to it too."""
    here = left[rank][-1]
    there = left[here.peer][-1] if left[here.peer] else None
    return (
        isinstance(there, Message)
        and (there.peer, label(there)) == (rank, label(here))
        and isinstance(there, Send) != isinstance(here, Send)
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_step_hangs_though_sends_and_receives_wait_for_each_other(name):
    for schedule in schedules(name):
        assert not hangs(operations_of(schedule)), schedule.name


def test_lists_in_which_two_ranks_disagree_do_hang():
    rows = [list(row) for row in with_messages(make_schedule("1f1b", 2, 1, 4))]
    first, second = [i for i, operation in enumerate(rows[0]) if isinstance(operation, Message)][1:3]
    rows[0][first], rows[0][second] = rows[0][second], rows[0][first]
    assert hangs(rows)


def test_a_pass_that_waits_for_a_later_one_of_its_own_rank_is_told():
    forward, backward = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0))
    last = (Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0))
    schedule = Schedule("1f1b", 2, 2, 1, ((backward, forward), last))
    with pytest.raises(ValueError, match="rank 0 before 0B0, rank 1 before 1F0"):
        with_messages(schedule)
