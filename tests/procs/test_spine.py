"""The spine: every layout gives one process's losses, gradients, norms and weights. Planted faults turn it red."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.engines.introspect import local_part
from tests.helpers.parity import STEPS, Recorder, cell_config, collate, compare_weights, rows, write_reference
from tests.helpers.world import RankFailed

# A layer with three matrices of 1M elements and a tied embedding of 1M: at 4 ranks each shard is still 1 MiB in fp32,
# below which DeepSpeed leaves it in memory whatever the config says.
SHAPE = {"hidden": 512, "layers": 1, "vocab": 2051, "intermediate": 2048}
SMALL = {"reduce_bucket_size": 700_000, "allgather_bucket_size": 700_000}
STAGE3 = {
    "stage": 3,
    "reduce_bucket_size": 700_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 300_000,
    "stage3_max_live_parameters": 1_500_000,
    "stage3_max_reuse_distance": 0,
    "sub_group_size": 600_000,
}
CPU = {"offload_optimizer": {"device": "cpu"}}


def deepspeed(**zero) -> dict:
    return {"parallel": {"engine": "deepspeed"}, "zero": zero}


def fsdp2(replicate: int = 1, **fsdp) -> dict:
    return {"parallel": {"engine": "fsdp2", "dp_replicate": replicate}, "fsdp": fsdp}


CELLS = {
    "ddp": {"parallel": {"engine": "ddp"}, "ddp": {"bucket_cap_mb": 1}},
    "zero0": deepspeed(stage=0),
    "zero1": deepspeed(stage=1, **SMALL),
    "zero2": deepspeed(stage=2, **SMALL),
    "zero3": deepspeed(**STAGE3),
    "zero1-cpu": deepspeed(stage=1, **SMALL, **CPU),
    "zero2-cpu": deepspeed(stage=2, **SMALL, **CPU),
    "zero3-cpu": deepspeed(**STAGE3, **CPU),
    "zero3-cpu-params": deepspeed(**STAGE3, **CPU, offload_param={"device": "cpu"}),
    "fsdp2": fsdp2(),
    "fsdp2-keep": fsdp2(reshard_after_forward=False),
    # On the CPU it moves nothing: this is the wiring alone.
    "fsdp2-offload": fsdp2(cpu_offload=True, pin_memory=False),
}
MAIN = ["ddp", "zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu"]
OF_FOUR = {"fsdp2-hsdp": fsdp2(replicate=2), "fsdp2-number": fsdp2(reshard_after_forward=2)}
"""Layouts that need four ranks."""
LAYERS_LEFT = {"fsdp2-keep": 1, "fsdp2-number": 1 / 2, "fsdp2-hsdp": 1 / 2}
"""Share of a block that a rank holds once it has run; elsewhere under FSDP2 what the rank owns."""
QUICK = (*(name for name in CELLS if name != "fsdp2-offload"), "fsdp2-hsdp")
"""`make test-all` runs the others too."""


def quick_or_slow(*names, quick=QUICK):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def reference(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    torch.set_num_threads(2)
    write_reference(folder, request.param, **SHAPE)
    return request.param, folder


def run_cell(reference: Path, out: Path, ranks: int, optimizer: str, sections: dict, fault: str | None = None):
    """One layout on this rank; returns what proves that its mechanism acted."""
    from ds_trainer.trainer.trainer import Trainer

    config = cell_config(reference, out, ranks, optimizer, **sections)
    recorder = Recorder(reference)
    data = rows(SHAPE["vocab"])
    trainer = Trainer(config=config, train_dataset=data, data_collator=collate, callbacks=[recorder])
    witness = Witness(trainer)
    if fault is not None:
        FAULTS[fault](trainer)
    with witness.collectives:
        trainer.train()
    proof = witness.proof()
    compare_weights(trainer, reference, optimizer)
    trainer.close()
    return proof


class Collectives(TorchDispatchMode):
    """Counts the calls of every collective, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if DTensor in types:  # It calls operators on plain tensors in turn.
            return NotImplemented
        if operator.namespace == "c10d":
            self.counts[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


class Witness:
    """Looks at live objects while a cell runs: what is there of the parameters, collectives, swap files, classes."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.released = []
        self.largest_live = 0
        self.held_inside, self.held_after = set(), set()
        self.collectives = Collectives()
        body = trainer.run.model.model
        body.layers[0].mlp.up_proj.register_forward_hook(self._look)
        self._projection = body.layers[0].self_attn.q_proj
        body.norm.register_forward_pre_hook(lambda *_: self.held_after.add(self._held()))

    def _held(self) -> float:
        """Which share of a matrix in the block is there."""
        return local_part(self._projection.weight).numel() / self._projection.weight.numel()

    def _look(self, module, inputs, output) -> None:
        if isinstance(self.trainer.run.model, FSDPModule):
            self.held_inside.add(self._held())
            return
        parameters = dict(self.trainer.run.model.named_parameters())
        self.released.append(parameters["model.layers.0.self_attn.q_proj.weight"].numel() == 0)
        self.largest_live = max(self.largest_live, sum(p.numel() for p in parameters.values()))

    def proof(self) -> dict:
        facts = self.trainer.engine.facts()
        model = self.trainer.run.model
        total = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        optimizer = getattr(self.trainer.engine.module, "optimizer", None)
        return {
            "facts": facts,
            "total": total,
            "released_before_mlp": all(self.released),
            "largest_live": self.largest_live,
            "sub_groups": len(getattr(optimizer, "fp16_groups", [])),
            "cut_by_rows": all(isinstance(p, DTensor) and p.placements[-1] == Shard(0) for p in model.parameters()),
            "held": (self.held_inside, self.held_after),
            "collectives": self.collectives.counts,
        }


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


FAULTS = {f.__name__: f for f in (mean_of_means, one_rank_not_reduced, tie_counted_twice)}


@pytest.mark.case("B1", "B8", "E7", "G6")
@pytest.mark.parametrize("cell", quick_or_slow(*CELLS))
def test_two_ranks_equal_one_process(world, reference, tmp_path, cell):
    optimizer, folder = reference
    proofs = world(run_cell, 2, folder, tmp_path, 2, optimizer, CELLS[cell])
    check_mechanism(cell, optimizer, proofs, ranks=2)


@pytest.mark.case("B8")
@pytest.mark.parametrize("cell", quick_or_slow("ddp", "zero0", "zero2", "zero3", "fsdp2", quick=["zero0", "fsdp2"]))
def test_one_rank_equals_plain_torch(world, reference, tmp_path, cell):
    optimizer, folder = reference
    world(run_cell, 1, folder, tmp_path, 1, optimizer, CELLS[cell])


@pytest.mark.case("B8")
@pytest.mark.parametrize("cell", quick_or_slow(*MAIN, quick=["ddp", "zero3"]))
def test_four_ranks_equal_one_process(world, reference, tmp_path, cell):
    optimizer, folder = reference
    proofs = world(run_cell, 4, folder, tmp_path, 4, optimizer, CELLS[cell])
    check_mechanism(cell, optimizer, proofs, ranks=4)


@pytest.mark.case("B8", "G6")
@pytest.mark.parametrize("cell", quick_or_slow(*OF_FOUR))
def test_layouts_of_four_ranks_equal_one_process(world, reference, tmp_path, cell):
    optimizer, folder = reference
    proofs = world(run_cell, 4, folder, tmp_path, 4, optimizer, OF_FOUR[cell])
    check_mechanism(cell, optimizer, proofs, ranks=4)


@pytest.mark.nvme
@pytest.mark.case("E6")
@pytest.mark.parametrize("what", ["optimizer", "params", "both"])
def test_nvme_equals_one_process_and_its_files_hold_the_bytes(world, reference, tmp_path, nvme, what):
    optimizer, folder = reference
    section = {"device": "nvme", "nvme_path": str(nvme)}
    cpu = {"device": "cpu"}
    zero = {
        "optimizer": {"offload_optimizer": section},
        "params": {"offload_optimizer": cpu, "offload_param": section},
        "both": {"offload_optimizer": section, "offload_param": section},
    }[what]
    # Derived here: 0 with parameters on nvme.
    stage3 = {key: value for key, value in STAGE3.items() if key != "stage3_prefetch_bucket_size"}
    proofs = world(run_cell, 2, folder, tmp_path, 2, optimizer, deepspeed(**stage3, **zero))
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


@pytest.mark.parametrize("reference", ["sgd"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cell", quick_or_slow("ddp", "zero2", "fsdp2", quick=["zero2", "fsdp2"]))
def test_a_planted_fault_turns_the_spine_red(world, reference, tmp_path, fault, cell):
    optimizer, folder = reference
    with pytest.raises(RankFailed, match="is off by"):
        world(run_cell, 2, folder, tmp_path, 2, optimizer, CELLS[cell], fault)


def check_mechanism(cell: str, optimizer: str, proofs: list[dict], ranks: int) -> None:
    for proof in proofs:
        facts, total = proof["facts"], proof["total"]
        if cell.startswith("zero3"):
            assert proof["released_before_mlp"], "attention's parameters must be released before the MLP runs"
            assert proof["largest_live"] < 0.75 * total
            assert proof["sub_groups"] > 1
            assert facts.param_bytes <= 1.02 * total * 4 / ranks
        if cell.startswith("fsdp2"):
            check_fsdp2(cell, optimizer, proof, ranks)
        if "cpu" in cell:
            assert facts.optimizer == ("DeepSpeedCPUAdam" if optimizer == "adamw" else "SGD")
        if cell[:5] in ("zero1", "zero2") and "cpu" not in cell:
            states = {"sgd": 2, "adamw": 3}[optimizer]  # master and momentum; master and two moments
            assert facts.optimizer_bytes == pytest.approx(states * 4 * total / ranks, rel=0.02)


def check_fsdp2(cell: str, optimizer: str, proof: dict, ranks: int) -> None:
    facts, total = proof["facts"], proof["total"]
    shards = ranks // facts.settings["parallel.dp_replicate"]
    assert proof["cut_by_rows"]
    assert facts.param_bytes <= 1.02 * total * 4 / shards
    states = {"sgd": 1, "adamw": 2}[optimizer]
    assert facts.optimizer_bytes == pytest.approx(states * 4 * total / shards, rel=0.02)
    inside, after = proof["held"]
    assert inside == {1.0}, "a block's parameters are whole while it runs"
    assert after == {LAYERS_LEFT.get(cell, 1 / ranks)}
    # Two groups, the block and the rest. Forward gathers both, backward the block again unless it was kept.
    microbatches, counts = 2 * STEPS, proof["collectives"]
    assert counts["c10d::_allgather_base_"] == (2 if cell == "fsdp2-keep" else 3) * microbatches
    assert counts["c10d::_reduce_scatter_base_"] == 2 * STEPS, "gradients are reduced once a step"
