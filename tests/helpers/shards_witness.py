"""Shows that sharding, offload and collectives of a layout acted: looks while it runs, checks afterwards."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.engines.introspect import local_shard
from tests.helpers.parity import STEPS

LAYERS_LEFT = {"fsdp2-keep": 1, "fsdp2-number": 1 / 2, "fsdp2-hsdp": 1 / 2}
"""Share of a block that a rank holds once it has run; elsewhere under FSDP2 what the rank owns."""


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


class ShardsWitness:
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
        return local_shard(self._projection.weight).numel() / self._projection.weight.numel()

    def _look(self, module, inputs, output) -> None:
        if isinstance(self.trainer.run.model, FSDPModule):
            self.held_inside.add(self._held())
            return
        parameters = dict(self.trainer.run.model.named_parameters())
        self.released.append(parameters["model.layers.0.self_attn.q_proj.weight"].numel() == 0)
        self.largest_live = max(self.largest_live, sum(p.numel() for p in parameters.values()))

    def watch(self) -> AbstractContextManager:
        """Counts collectives."""
        return self.collectives

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
