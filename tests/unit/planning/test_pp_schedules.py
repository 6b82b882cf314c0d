"""The passes of every schedule: those of torch.distributed.pipelining, rank by rank, and what they need."""

import re
import time
from types import SimpleNamespace
from typing import get_args

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from ds_trainer.config.engine_sections import Schedule
from ds_trainer.errors import ConfigError
from ds_trainer.planning.pp_schedules import (
    NAMES,
    Action,
    Kind,
    accepts,
    default_virtual_stages,
    forward_only,
    make_schedule,
    next_accepted,
    schedule_problem,
    splits_backward,
    stages_of,
)
from tests.helpers.table import table

IN_TORCH = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
ONE_STAGE = ("gpipe", "1f1b")
V_SHAPED = ("zbv", "dualpipev")
SEVERAL_STAGES = ("interleaved_1f1b", "interleaved_zero_bubble", *V_SHAPED)


def fake_stage(ranks: int, stages: int, index: int, **more) -> SimpleNamespace:
    """As much of torch's stage as a schedule asks for when it orders its passes."""
    place = {"group_size": ranks, "group_rank": index % ranks, "num_stages": stages, "stage_index": index}
    return SimpleNamespace(**place, submod=None, is_last=index == stages - 1, **more)


def as_torch_runs(name: str, ranks: int, rank: int, microbatches: int) -> list[str]:
    """The passes that torch's schedules of one stage per rank make when they run.

    Not their `pipeline_order`, which is only drawn: in torch 2.13 the last rank of 1F1B counts micro-batches from 1.
    """
    ran: list[str] = []
    stage = fake_stage(
        ranks,
        ranks,
        rank,
        forward_one_chunk=lambda microbatch, *args, **kwargs: ran.append(f"{rank}F{microbatch}"),
        backward_one_chunk=lambda microbatch, **kwargs: ran.append(f"{rank}B{microbatch}"),
        perform_reduce_grad=lambda factor: None,
        **dict.fromkeys(
            ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), lambda microbatch: []
        ),
    )

    class WithoutTensors(IN_TORCH[name]):
        def _initialize_stage(self, *args, **kwargs):
            """Would send the shapes of hidden states to the next stage."""

    WithoutTensors(stage, microbatches)._step_microbatches()
    return ran


def as_torch_orders(name: str, ranks: int, virtual_stages: int, microbatches: int) -> list[list[str]]:
    """The passes of torch's schedules of several stages per rank, overlapped ones one after the other."""
    stages = [fake_stage(ranks, ranks * virtual_stages, turn * ranks) for turn in range(virtual_stages)]
    order = IN_TORCH[name](stages, microbatches).pipeline_order
    return [
        [str(part) for action in order[rank] if action is not None for part in action.sub_actions or (action,)]
        for rank in range(ranks)
    ]


def texts(schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.actions]


def test_the_names_are_those_of_the_config():
    assert get_args(Schedule) == NAMES


@table("ranks", [2, 3, 4, 8])
@table("name", ONE_STAGE)
def test_with_one_stage_on_a_rank_the_passes_are_those_torch_makes(name, ranks):
    for microbatches in (ranks, ranks + 1, 2 * ranks, 4 * ranks + 1):
        ours = texts(make_schedule(name, ranks, 1, microbatches))
        assert ours == [as_torch_runs(name, ranks, rank, microbatches) for rank in range(ranks)]


@table("ranks", [2, 3, 4, 8])
@table("name", SEVERAL_STAGES)
def test_with_several_stages_on_a_rank_the_passes_are_those_of_torch(name, ranks):
    for virtual_stages in (2,) if name in V_SHAPED else (2, 3):
        for number in (1, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 2, 4 * ranks + 1):
            microbatches = next_accepted(name, ranks, virtual_stages, number)
            ours = texts(make_schedule(name, ranks, virtual_stages, microbatches))
            assert ours == as_torch_orders(name, ranks, virtual_stages, microbatches), (virtual_stages, microbatches)


@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_the_same_numbers_of_micro_batches_are_taken_as_by_torch(name):
    for ranks in (2, 3, 4):
        for microbatches in range(1, 4 * ranks):
            try:
                as_torch_orders(name, ranks, 2, microbatches)
            except ValueError:
                taken = False
            else:
                taken = True
            assert accepts(name, ranks, 2, microbatches) == taken, (ranks, microbatches)


def cases() -> list[tuple[str, int, int, int]]:
    """Everything that is accepted of a range of ranks, stages per rank and micro-batches."""
    return [
        (name, ranks, virtual_stages, microbatches)
        for name in NAMES
        for ranks in (1, 2, 3, 4, 8)
        for virtual_stages in (1, 2, 4)
        for microbatches in (1, 2, 3, 5, 8, 16, 20)
        if accepts(name, ranks, virtual_stages, microbatches)
    ]


def test_every_micro_batch_passes_every_stage_once_in_each_direction_on_the_rank_that_holds_it():
    assert len(cases()) > 150
    for case in cases():
        schedule = make_schedule(*case)
        places = {action: (rank, i) for rank, row in enumerate(schedule.actions) for i, action in enumerate(row)}
        assert len(places) == sum(map(len, schedule.actions)), case
        assert all(rank == schedule.rank_of(action.stage) for action, (rank, _) in places.items()), case
        for stage in range(schedule.num_stages):
            assert stage in schedule.stages_of(schedule.rank_of(stage))
            for microbatch in range(schedule.num_microbatches):
                passes = [places.get(Action(kind, stage, microbatch)) for kind in Kind]
                forward, backward, input, weight = passes
                in_order = [forward, backward] if backward else [forward, input, weight]
                assert len(in_order) == sum(place is not None for place in passes), (case, stage, microbatch)
                assert None not in in_order and in_order == sorted(in_order), (case, stage, microbatch)


def test_only_zero_bubble_schedules_split_the_backward_pass():
    for name, ranks, virtual_stages, microbatches in cases():
        kinds = {a.kind for row in make_schedule(name, ranks, virtual_stages, microbatches).actions for a in row}
        assert (Kind.INPUT in kinds) == splits_backward(name)


def test_stages_go_round_the_ranks_or_down_and_up_again():
    assert [stages_of("interleaved_1f1b", 4, 2, rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [stages_of("zbv", 4, 2, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [stages_of("gpipe", 2, 1, rank) for rank in range(2)] == [(0,), (1,)]


def test_an_evaluation_runs_forward_passes_of_any_number_of_micro_batches_where_training_has_the_stages():
    for name in NAMES:
        for ranks in (2, 3, 4):
            for microbatches in range(1, 14):
                virtual_stages = default_virtual_stages(name)
                schedule = forward_only(name, ranks, virtual_stages, microbatches)
                every = {Action(Kind.FORWARD, s, m) for s in range(schedule.num_stages) for m in range(microbatches)}
                assert {action for row in schedule.actions for action in row} == every
                assert sum(map(len, schedule.actions)) == len(every)
                assert [{a.stage for a in row} for row in schedule.actions] == [
                    set(stages_of(name, ranks, virtual_stages, rank)) for rank in range(ranks)
                ]


@pytest.mark.case("I9")
@table(
    ("case", "change"),
    [
        (("gpipe", 4, 1, 3), "batch.accumulation to 4 or more"),
        (("1f1b", 8, 1, 1), "batch.accumulation to 8 or more"),
        (("interleaved_1f1b", 4, 2, 2), "batch.accumulation to 4 or another multiple of 4"),
        (("interleaved_1f1b", 4, 2, 9), "batch.accumulation to 8 or 10"),
        (("interleaved_zero_bubble", 4, 3, 13), "batch.accumulation to 12 or 15"),
        (("zbv", 4, 2, 3), "batch.accumulation to 4 or more"),
        (("dualpipev", 4, 2, 7), "batch.accumulation to 8 or more"),
        (("1f1b", 4, 2, 8), "virtual_stages to 1, or parallel.schedule to one of interleaved_1f1b"),
        (("interleaved_1f1b", 4, 1, 8), "virtual_stages to 2, or parallel.schedule to one of gpipe, 1f1b"),
        (("zbv", 4, 3, 8), "virtual_stages to 2, or parallel.schedule to one of interleaved_1f1b"),
        (("dualpipev", 4, 1, 8), "virtual_stages to 2, or parallel.schedule to one of gpipe, 1f1b"),
    ],
)
def test_a_refusal_names_the_numbers_that_work(case, change):
    reason = schedule_problem(*case)
    assert reason is not None
    assert change in reason[2]


def test_the_numbers_that_a_refusal_names_are_accepted():
    for name in NAMES:
        for ranks in (2, 3, 4, 7):
            virtual_stages = default_virtual_stages(name)
            for microbatches in range(1, 40):
                if reason := schedule_problem(name, ranks, virtual_stages, microbatches):
                    for number in map(int, re.findall(r"\d+", reason[2])):
                        assert schedule_problem(name, ranks, virtual_stages, number) is None


def test_what_a_schedule_does_not_take_raises_the_refusal():
    with pytest.raises(ConfigError, match="set batch.accumulation to 8 or 10"):
        make_schedule("interleaved_1f1b", 4, 2, 9)


def test_a_short_step_is_filled_up_only_where_the_schedule_needs_it():
    assert [next_accepted(name, 4, default_virtual_stages(name), 2) for name in NAMES] == [2, 2, 2, 2, 2, 8]
    assert next_accepted("interleaved_1f1b", 4, 2, 9) == 10


@pytest.mark.alone
def test_a_schedule_of_64_ranks_and_512_micro_batches_is_made_within_two_seconds():
    start = time.process_time()
    schedule = make_schedule("interleaved_zero_bubble", 64, 2, 512)
    assert time.process_time() - start < 2
    assert sum(map(len, schedule.actions)) == 3 * 128 * 512
