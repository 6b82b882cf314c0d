"""Six steps straight equal three, kill -9, and three more: bit for bit, on every engine and offload."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import CELLS, OF_FOUR, STAGE3, deepspeed, with_tensor_ranks
from tests.helpers.resume import check_resumed, killed_and_resumed, train
from tests.helpers.tiers import tiers

SLOW = ["zero2-cpu", "fsdp2", "zero2", "zero3-cpu-params"]
TENSOR = [(2, "ddp"), (2, "zero2"), (2, "zero3"), (4, "fsdp2"), (4, "zero2-cpu")]
TENSOR = [(*cell, how) for cell in TENSOR for how in ("tensor", "sequence")]
TENSOR_SLOW = [(2, "zero3", "sequence"), (4, "fsdp2", "tensor")]


@pytest.mark.case("C2", "C3")
@pytest.mark.parametrize("cell", tiers(CELLS, quick=["zero3"], slow=SLOW))
def test_a_killed_run_goes_on_bit_for_bit(world, tmp_path, resume_checkpoint, cell):
    sections = CELLS[cell]
    straight = world(train, 2, tmp_path / "straight", resume_checkpoint, sections, {})
    check_resumed(straight, killed_and_resumed(world, tmp_path / "cut", 2, resume_checkpoint, sections))


@pytest.mark.parametrize("cell", tiers(["ddp", "zero2", "zero3", *OF_FOUR], slow=["fsdp2-hsdp"]))
def test_four_ranks_go_on_bit_for_bit(world, tmp_path, resume_checkpoint, cell):
    sections = (CELLS | OF_FOUR)[cell]
    straight = world(train, 4, tmp_path / "straight", resume_checkpoint, sections, {})
    check_resumed(straight, killed_and_resumed(world, tmp_path / "cut", 4, resume_checkpoint, sections))


@pytest.mark.case("I7")
@pytest.mark.parametrize(("ranks", "cell", "how"), tiers(TENSOR, slow=TENSOR_SLOW))
def test_tensor_ranks_go_on_bit_for_bit(world, tmp_path, resume_checkpoint, ranks, cell, how):
    sections = with_tensor_ranks(cell, sequence_parallel=how == "sequence")
    straight = world(train, ranks, tmp_path / "straight", resume_checkpoint, sections, {})
    assert all(facts.settings["parallel.tp"] == 2 for *_, facts in straight)
    check_resumed(straight, killed_and_resumed(world, tmp_path / "cut", ranks, resume_checkpoint, sections))


@pytest.mark.slow
def test_what_powersgd_owes_goes_on_bit_for_bit(world, tmp_path, resume_checkpoint):
    sections = {"parallel": {"engine": "ddp"}, "ddp": {"comm_hook": "powersgd", "powersgd_rank": 2}}
    straight = world(train, 2, tmp_path / "straight", resume_checkpoint, sections, {})
    plain = world(train, 2, tmp_path / "plain", resume_checkpoint, CELLS["ddp"], {})
    assert straight[0][1] != plain[0][1], "the compression must act"
    check_resumed(straight, killed_and_resumed(world, tmp_path / "cut", 2, resume_checkpoint, sections))


@pytest.mark.nvme
@pytest.mark.parametrize("what", tiers(["optimizer", "both"], slow=["both"]))
def test_states_on_nvme_go_on_bit_for_bit(world, tmp_path, resume_checkpoint, nvme, what):
    section = {"device": "nvme", "nvme_path": str(nvme)}
    stage3 = {key: value for key, value in STAGE3.items() if key != "stage3_prefetch_bucket_size"}
    zero = {"offload_optimizer": section} | ({"offload_param": section} if what == "both" else {})
    sections = deepspeed(**stage3, **zero)
    straight = world(train, 2, tmp_path / "straight", resume_checkpoint, sections, {})
    for _, _, facts in straight:
        assert facts.nvme_bytes > 10e6 and facts.optimizer_device == "nvme", "the states must really lie there"
    check_resumed(straight, killed_and_resumed(world, tmp_path / "cut", 2, resume_checkpoint, sections))
