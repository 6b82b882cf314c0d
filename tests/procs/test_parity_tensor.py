"""Parity under tensor parallelism: every engine, with and without sequence and data parallelism beside it."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.helpers.layouts import SHAPE, with_tensor_ranks
from tests.helpers.parity import STEPS
from tests.helpers.parity_runs import run_cell
from tests.helpers.tiers import in_pairs, tiers
from tests.helpers.world import RankFailed

TP = 2
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2-cpu")
LAYOUTS = list(product(ENGINES, ["tensor", "sequence"], ["dp1", "dp2"]))
CELLS = [(*layout, optimizer) for layout in LAYOUTS for optimizer in ("sgd", "adamw")]
QUICK = [("zero2", "sequence", "dp1", "sgd"), ("zero3", "tensor", "dp1", "sgd")]
KV_SLOW = [("fsdp2", "tensor", "dp2"), ("zero2", "sequence", "dp2"), ("zero3", "tensor", "dp1")]
RECOMPUTED = list(product(["ddp", "zero2", "zero3", "fsdp2"], ["tensor", "sequence"], [True, "selective"]))
RECOMPUTED_SLOW = [("ddp", "tensor", True), ("zero2", "sequence", "selective"), ("fsdp2", "tensor", "selective")]
RECOMPUTED_SLOW += [("zero3", "sequence", True)]
ONE_KV_HEAD = SHAPE | {"num_key_value_heads": 1}
CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
"""Dimension of its weight along which a layer is cut."""


class Witness:
    """Looks at live objects while a cell runs: positions that a norm sees, parameters that attention leaves behind."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.positions: Counter[tuple[int, int]] = Counter()
        self.released = True
        body = trainer.run.model.model
        body.register_forward_pre_hook(self._see_ids, with_kwargs=True)
        body.layers[0].input_layernorm.register_forward_pre_hook(self._see_hidden)
        body.layers[0].self_attn.register_forward_hook(self._see_released)

    def _see_ids(self, module, args, kwargs) -> None:
        self._length = kwargs["input_ids"].shape[1]

    def _see_hidden(self, module, args) -> None:
        self.positions[self._length, args[0].shape[1]] += 1

    def _see_released(self, module, args, output) -> None:
        # Asked for by its name, a parameter would be gathered.
        self.released &= not any(parameter.numel() for parameter in module.parameters())

    def watch(self) -> AbstractContextManager:
        return nullcontext()

    def proof(self) -> dict:
        named = self.trainer.run.model.named_parameters()
        return {
            "facts": self.trainer.engine.facts(),
            "shapes": {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named},
            "positions": self.positions,
            "released": self.released,
            "norm": self.trainer.state.grad_norm,
        }


def input_gradients_not_summed(trainer) -> None:
    """Each rank goes on with its own part of the MLP's input gradient."""
    for layer in trainer.run.model.model.layers:
        layer.mlp.gate_proj.column_group._group = trainer.run.mesh.dp_group  # of one rank


def copies_counted_twice(trainer) -> None:
    """Every tensor rank adds its copies of the norms' gradients to the global norm."""
    trainer.engine._split = replace(trainer.engine._split, rank=0)


@pytest.mark.case("B8", "G6", "I2", "I4")
@pytest.mark.parametrize(("engine", "how", "data", "optimizer"), tiers(CELLS, quick=QUICK, slow=in_pairs(CELLS)))
def test_tensor_ranks_equal_one_process(world, references, tmp_path, engine, how, data, optimizer):
    folder, data, sequence = references(optimizer, SHAPE), int(data[2:]), how == "sequence"
    cell = with_tensor_ranks(engine, sequence_parallel=sequence)
    proofs = world(run_cell, TP * data, folder, tmp_path, data, optimizer, cell, Witness)
    for proof in proofs:
        check_split(proof, data, kv_heads=2)
        check_sequence(proof, sequence)
        if engine == "zero3":
            assert proof["released"], "attention's parameters must be released as soon as it has run"
    assert len({proof["norm"] for proof in proofs}) == 1, "bit for bit the same on all ranks"


@pytest.mark.case("I1", "G6")
@pytest.mark.parametrize(
    ("engine", "how", "data"),
    tiers(LAYOUTS, slow=KV_SLOW),
)
def test_copies_of_a_kv_head_equal_one_process(world, references, tmp_path, engine, how, data):
    folder, data = references("sgd", ONE_KV_HEAD), int(data[2:])
    cell = with_tensor_ranks(engine, sequence_parallel=how == "sequence")
    for proof in world(run_cell, TP * data, folder, tmp_path, data, "sgd", cell, Witness):
        check_split(proof, data, kv_heads=1)


@pytest.mark.case("H1")
@pytest.mark.parametrize(("engine", "how", "recompute"), tiers(RECOMPUTED, slow=RECOMPUTED_SLOW))
def test_recomputed_blocks_equal_one_process(world, references, tmp_path, engine, how, recompute):
    folder, sequence = references("sgd", SHAPE), how == "sequence"
    model = {"path": str(folder / "checkpoint"), "gradient_checkpointing": recompute}
    cell = with_tensor_ranks(engine, sequence_parallel=sequence) | {"model": model}
    for proof in world(run_cell, TP, folder, tmp_path, 1, "sgd", cell, Witness):
        check_split(proof, 1, kv_heads=2)
        check_sequence(proof, sequence)


@pytest.mark.parametrize("ranks", tiers([4, 8], slow=[4]))
def test_tensor_ranks_beside_copies_of_the_model_equal_one_process(world, references, tmp_path, ranks):
    cell = {"parallel": {"engine": "fsdp2", "dp_replicate": 2, "tp": TP}}
    for proof in world(run_cell, ranks, references("sgd", SHAPE), tmp_path, ranks // TP, "sgd", cell, Witness):
        assert proof["facts"].settings["parallel.tp"] == TP
        assert proof["facts"].group_size == ranks // TP


@pytest.mark.parametrize(
    ("fault", "message"),
    [(input_gradients_not_summed, "gradient of .* is off by"), (copies_counted_twice, "norms .* != ")],
)
def test_a_planted_fault_is_detected(world, references, tmp_path, fault, message):
    with pytest.raises(RankFailed, match=message):
        world(run_cell, TP, references("sgd", SHAPE), tmp_path, 1, "sgd", with_tensor_ranks("ddp"), Witness, fault)


def check_split(proof: dict, data: int, kv_heads: int) -> None:
    facts, shapes = proof["facts"], proof["shapes"]
    assert facts.settings["parallel.tp"] == TP and facts.group_size == data
    hidden, inner = SHAPE["hidden"], SHAPE["intermediate"]
    assert shapes["model.embed_tokens.weight"] == (-(-SHAPE["vocab"] // TP), hidden), "padded"
    whole = {"q": (hidden, hidden), "k": (kv_heads * hidden // 4, hidden), "o": (hidden, hidden)}
    whole |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    whole["v"] = whole["k"]
    for name, dim in CUT.items():
        expected = list(whole[name.removesuffix("_proj")])
        if not (name in ("k_proj", "v_proj") and kv_heads == 1):
            expected[dim] //= TP
        found = [shape for parameter, shape in shapes.items() if parameter.endswith(f"{name}.weight")]
        assert found == [tuple(expected)] * SHAPE["layers"]
    held = sum(torch.Size(shape).numel() for shape in shapes.values()) * 4
    shards = data if facts.stage == 3 or facts.engine == "FSDP2" else 1
    assert facts.param_bytes == pytest.approx(held / shards, rel=0.02)


def check_sequence(proof: dict, sequence: bool) -> None:
    assert proof["positions"].total() >= STEPS
    for length, seen in proof["positions"]:
        assert seen == (-(-length // TP) if sequence else length)
    assert any(length % TP for length, _ in proof["positions"]), "some lengths do not divide"
