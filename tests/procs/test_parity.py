"""Parity: every layout gives one process's losses, gradients, norms and weights. Planted faults are detected."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.layouts import CELLS, OF_FOUR, SHAPE, STAGE3, deepspeed
from tests.helpers.parity_runs import run_cell
from tests.helpers.shards_witness import ShardsWitness, check_mechanism
from tests.helpers.tiers import tiers
from tests.helpers.world import RankFailed

MAIN = ["ddp", "zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu"]
OPTIMIZERS = ("adamw", "sgd")
QUICK = [("zero3", "adamw"), ("zero2-cpu", "adamw"), ("fsdp2", "sgd")]
SLOW = [(cell, "adamw") for cell in CELLS] + [("zero2", "sgd")]
FOUR_RANKS = tiers(
    product(MAIN, OPTIMIZERS),
    slow=[("zero2", "adamw"), ("zero3", "adamw")],
)
HYBRID = tiers(product(OF_FOUR, OPTIMIZERS), slow=[("fsdp2-hsdp", "adamw"), ("fsdp2-number", "sgd")])


def mean_of_means(trainer) -> None:
    """Divides each micro-batch by its own tokens, as if all had as many."""
    loss = trainer.run.loss
    exact = loss.loss_sum
    calls = 4  # micro-batches of a full step at accumulation 2 on 2 ranks
    loss.loss_sum = lambda outputs, batch, total: exact(outputs, batch, total) / loss.num_tokens(batch) * total / calls


def one_rank_not_reduced(trainer) -> None:
    """The second rank's share never arrives."""
    backward, rank = trainer.engine.backward, trainer.run.mesh.grid.rank
    trainer.engine.backward = lambda loss: backward(loss * (rank != 1))


def tie_counted_twice(trainer) -> None:
    """The embedding's share of the tied weight's gradient is added twice."""

    def double(module, inputs, output):
        output.register_hook(lambda grad: grad * 2)

    trainer.run.model.get_input_embeddings().register_forward_hook(double)


@pytest.mark.case("B1", "B8", "E7", "G6")
@pytest.mark.parametrize(("cell", "optimizer"), tiers(product(CELLS, OPTIMIZERS), quick=QUICK, slow=SLOW))
def test_two_ranks_equal_one_process(world, references, tmp_path, cell, optimizer):
    folder = references(optimizer, SHAPE)
    proofs = world(run_cell, 2, folder, tmp_path, 2, optimizer, CELLS[cell], ShardsWitness)
    check_mechanism(cell, optimizer, proofs, ranks=2)


@pytest.mark.case("B8")
@pytest.mark.parametrize(
    ("cell", "optimizer"),
    tiers(
        product(["ddp", "zero0", "zero2", "zero3", "fsdp2"], OPTIMIZERS),
        quick=[("fsdp2", "adamw")],
        slow=[("zero0", "sgd"), ("zero3", "adamw"), ("zero2", "sgd")],
    ),
)
def test_one_rank_equals_plain_torch(world, references, tmp_path, cell, optimizer):
    folder = references(optimizer, SHAPE)
    world(run_cell, 1, folder, tmp_path, 1, optimizer, CELLS[cell], ShardsWitness)


@pytest.mark.case("B8")
@pytest.mark.parametrize(("cell", "optimizer"), FOUR_RANKS)
def test_four_ranks_equal_one_process(world, references, tmp_path, cell, optimizer):
    folder = references(optimizer, SHAPE)
    proofs = world(run_cell, 4, folder, tmp_path, 4, optimizer, CELLS[cell], ShardsWitness)
    check_mechanism(cell, optimizer, proofs, ranks=4)


@pytest.mark.case("B8", "G6")
@pytest.mark.parametrize(("cell", "optimizer"), HYBRID)
def test_layouts_of_four_ranks_equal_one_process(world, references, tmp_path, cell, optimizer):
    folder = references(optimizer, SHAPE)
    proofs = world(run_cell, 4, folder, tmp_path, 4, optimizer, OF_FOUR[cell], ShardsWitness)
    check_mechanism(cell, optimizer, proofs, ranks=4)


@pytest.mark.nvme
@pytest.mark.case("E6")
@pytest.mark.parametrize(
    ("what", "optimizer"),
    tiers(
        product(["optimizer", "params", "both"], OPTIMIZERS),
        slow=[("both", "adamw"), ("params", "sgd")],
    ),
)
def test_nvme_equals_one_process_and_its_files_hold_the_bytes(world, references, tmp_path, nvme, what, optimizer):
    folder = references(optimizer, SHAPE)
    section = {"device": "nvme", "nvme_path": str(nvme)}
    cpu = {"device": "cpu"}
    zero = {
        "optimizer": {"offload_optimizer": section},
        "params": {"offload_optimizer": cpu, "offload_param": section},
        "both": {"offload_optimizer": section, "offload_param": section},
    }[what]
    # Derived here: 0 with parameters on nvme.
    stage3 = {key: value for key, value in STAGE3.items() if key != "stage3_prefetch_bucket_size"}
    proofs = world(run_cell, 2, folder, tmp_path, 2, optimizer, deepspeed(**stage3, **zero), ShardsWitness)
    for proof in proofs:
        facts, shard = proof["facts"], proof["total"] / 2
        if what in ("optimizer", "both"):
            assert facts.optimizer_device == "nvme"
        assert facts.optimizer == {"adamw": "DeepSpeedCPUAdam", "sgd": "SGD"}[optimizer]
        if what in ("params", "both"):
            assert facts.param_device == "nvme"
        # fp32: 4 bytes per parameter, as much for its master and each of its states. Small tensors stay in memory.
        state = {"adamw": 12, "sgd": 8}[optimizer]
        wanted = {"optimizer": state, "params": 4, "both": 4 + state}[what]
        assert 0.8 * wanted * shard <= facts.nvme_bytes
    assert list(nvme.iterdir()) == [], "swap files are removed at the end"


@pytest.mark.parametrize("fault", [mean_of_means, one_rank_not_reduced, tie_counted_twice])
@pytest.mark.parametrize("cell", tiers(["ddp", "zero2", "fsdp2"], quick=["zero2"], slow=["fsdp2"]))
def test_a_planted_fault_is_detected(world, references, tmp_path, fault, cell):
    with pytest.raises(RankFailed, match="is off by"):
        world(run_cell, 2, references("sgd", SHAPE), tmp_path, 2, "sgd", CELLS[cell], ShardsWitness, fault)
