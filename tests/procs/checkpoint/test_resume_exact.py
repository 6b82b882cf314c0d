"""Six steps straight equal three, kill -9, and three more: bit for bit, on every engine and offload."""

from __future__ import annotations

import pytest

from tests.helpers.resume import EVERY, STEPS, train, write_checkpoint
from tests.helpers.world import RankFailed
from tests.procs.test_spine import CELLS, OF_FOUR, STAGE3, deepspeed
from tests.procs.test_spine_tensor import sections as tensor_sections

QUICK = ["ddp", "zero1", "zero2-cpu", "zero3", "fsdp2"]
"""One of every way to cut and keep states; `make test-all` runs the others."""


def cells(*names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def killed_and_resumed(world, out, ranks, checkpoint, sections):
    with pytest.raises(RankFailed):
        world(train, ranks, out, checkpoint, sections, {}, EVERY + 1)
    assert [path.name for path in sorted(out.glob("checkpoint-*"))] == [f"checkpoint-{EVERY}"]
    return world(train, ranks, out, checkpoint, sections, {"checkpoint": {"resume": "auto"}})


def check(straight, resumed):
    for (steps, state, _), (later_steps, later_state, _) in zip(straight, resumed, strict=True):
        assert [step[0] for step in later_steps] == list(range(EVERY + 1, STEPS + 1))
        assert later_steps == steps[EVERY:]
        assert later_state == state


@pytest.mark.case("C2", "C3")
@pytest.mark.parametrize("cell", cells(*CELLS, quick=QUICK))
def test_a_killed_run_goes_on_bit_for_bit(world, tmp_path, checkpoint, cell):
    sections = CELLS[cell]
    straight = world(train, 2, tmp_path / "straight", checkpoint, sections, {})
    check(straight, killed_and_resumed(world, tmp_path / "cut", 2, checkpoint, sections))


@pytest.mark.parametrize("cell", cells("ddp", "zero2", "zero3", *OF_FOUR, quick=["ddp"]))
def test_four_ranks_go_on_bit_for_bit(world, tmp_path, checkpoint, cell):
    sections = (CELLS | OF_FOUR)[cell]
    straight = world(train, 4, tmp_path / "straight", checkpoint, sections, {})
    check(straight, killed_and_resumed(world, tmp_path / "cut", 4, checkpoint, sections))


@pytest.mark.case("I7")
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize(("ranks", "cell"), [(2, "ddp"), (2, "zero2"), (2, "zero3"), (4, "fsdp2"), (4, "zero2-cpu")])
@pytest.mark.slow
def test_tensor_ranks_go_on_bit_for_bit(world, tmp_path, checkpoint, ranks, cell, sequence):
    sections = tensor_sections(cell, sequence_parallel=sequence)
    straight = world(train, ranks, tmp_path / "straight", checkpoint, sections, {})
    assert all(facts.settings["parallel.tp"] == 2 for *_, facts in straight)
    check(straight, killed_and_resumed(world, tmp_path / "cut", ranks, checkpoint, sections))


@pytest.mark.slow
def test_what_powersgd_owes_goes_on_bit_for_bit(world, tmp_path, checkpoint):
    sections = {"parallel": {"engine": "ddp"}, "ddp": {"comm_hook": "powersgd", "powersgd_rank": 2}}
    straight = world(train, 2, tmp_path / "straight", checkpoint, sections, {})
    plain = world(train, 2, tmp_path / "plain", checkpoint, CELLS["ddp"], {})
    assert straight[0][1] != plain[0][1], "the compression must act"
    check(straight, killed_and_resumed(world, tmp_path / "cut", 2, checkpoint, sections))


@pytest.mark.nvme
@pytest.mark.parametrize("what", cells("optimizer", "both", quick=["both"]))
def test_states_on_nvme_go_on_bit_for_bit(world, tmp_path, checkpoint, nvme, what):
    section = {"device": "nvme", "nvme_path": str(nvme)}
    stage3 = {key: value for key, value in STAGE3.items() if key != "stage3_prefetch_bucket_size"}
    zero = {"offload_optimizer": section} | ({"offload_param": section} if what == "both" else {})
    sections = deepspeed(**stage3, **zero)
    straight = world(train, 2, tmp_path / "straight", checkpoint, sections, {})
    for _, _, facts in straight:
        assert facts.nvme_bytes > 10e6 and facts.optimizer_device == "nvme", "the states must really lie there"
    check(straight, killed_and_resumed(world, tmp_path / "cut", 2, checkpoint, sections))
