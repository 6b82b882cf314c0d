"""Parity through a pipeline: every schedule, engine and combination with other axes gives one process's steps.

Tolerances are the parity tests' (tests/helpers/parity.py): losses within 1e-6, gradients within 1e-5 of their tensor's
largest element, since sums are taken in another order. Eight layers, which four ranks with two stages each need,
amplify that: at the usual learning rates one process in fp32 is 4e-5 away from itself in fp64 after four steps, at a
fifth and a tenth of them 3e-6. In bf16 a stage computes what the same layers compute in one
process, so that the first step's gradients, sums in fp32 of many in bf16, are held as tight; only a tied weight's two
parts are rounded one by one. From the second step on a weight may be rounded the other way, which eight layers make
some percent of a gradient's largest element.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from ds_trainer.engines.introspect import content_hash
from ds_trainer.planning.pp_schedules import default_virtual_stages, make_schedule, next_accepted
from ds_trainer.planning.pp_timeline import simulate
from tests.helpers import parity
from tests.helpers.parity import Recorder
from tests.helpers.parity_runs import run_cell
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import oracle, tiny_llama
from tests.helpers.world import RankFailed

SHAPE = {"hidden": 64, "layers": 8, "vocab": 131}
LR = {"sgd": 0.1, "adamw": 1e-3}
TIED = "model.embed_tokens.weight"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
SMALL = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
ENGINES: dict[str, dict] = {
    "ddp": {"parallel": {"engine": "ddp"}, "ddp": {"bucket_cap_mb": 1}},
    "fsdp2": {"parallel": {"engine": "fsdp2"}},
    "fsdp2-reshard": {"parallel": {"engine": "fsdp2"}, "fsdp": {"reshard_after_forward": True}},
    "zero0": {"parallel": {"engine": "deepspeed"}, "zero": {"stage": 0}},
    "zero1": {"parallel": {"engine": "deepspeed"}, "zero": {"stage": 1, **SMALL}},
    "zero1-cpu": {
        "parallel": {"engine": "deepspeed"},
        "zero": {"stage": 1, **SMALL, "offload_optimizer": {"device": "cpu"}},
    },
}
BF16 = ("ddp", "fsdp2", "fsdp2-reshard", "zero0", "zero1", "zero1-cpu")
BF16_SLOW = [("zero1", 2, "tied"), ("zero1-cpu", 1, "untied")]
AUTOCAST = ("ddp", "zero0")
"""Engines whose parameters are fp32 in a bf16 run."""


def cell(engine: str, schedule: str, pp: int = 2, **parallel) -> dict:
    """The sections of one layout."""
    sections = ENGINES[engine]
    return sections | {"parallel": sections["parallel"] | {"pp": pp, "schedule": schedule} | parallel}


@pytest.fixture
def reference(references):
    """`reference(optimizer, precision, **shape)`: one process's run at the learning rates of the parity tests."""
    return lambda optimizer, precision="fp32", **shape: references(optimizer, SHAPE | shape, LR[optimizer], precision)


def run_cells(reference: Path, out: Path, data: int, optimizer: str, cells: list[dict], *how) -> list[dict]:
    """Several layouts one after the other on these ranks, each held against the reference; returns their proofs."""
    return [run_stages(reference, out, data, optimizer, sections, *how) for sections in cells]


def run_stages(
    reference: Path, out: Path, data: int, optimizer: str, sections: dict, fault=None, tied: bool = True
) -> dict:
    """One layout, micro-batches of one sample; returns what proves that it was a pipeline."""
    keys: dict = {"lr": LR[optimizer], "callbacks": [Copies()]}
    if "precision" in sections:
        keys |= {"recorder": partial(LowRecorder, tied=tied), "weight_tolerance": LOW_TOLERANCE}
    batch = {"batch": {"global_size": parity.GLOBAL, "micro_size": 1}}
    return run_cell(reference, out, data, optimizer, batch | sections, StagesWitness, fault, **keys)


class StagesWitness:
    """What each stage holds and owns, and how many micro-batches were in flight."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def watch(self) -> AbstractContextManager:
        return nullcontext()

    def proof(self) -> dict:
        trainer = self.trainer
        return {
            "facts": trainer.engine.facts(),
            "held": sorted(name for name, _ in trainer.run.model.named_parameters()),
            "owned": sorted({part.name for part in trainer.engine.parameter_layout()}),
            "peak": trainer.run.executor._runtime.peak_in_flight,
            "norm": trainer.state.grad_norm,
            "place": (trainer.run.mesh.grid.pp_rank, trainer.run.mesh.grid.dp_rank),
        }


LOW_TOLERANCE = 2e-2
"""Of bf16, as in cases.md."""


class LowRecorder(Recorder):
    """In bf16.

    Args:
        reference: What `write_bf16_reference` wrote.
        tied: Whether the model's embeddings are tied.
    """

    loss_tolerance = norm_tolerance = LOW_TOLERANCE

    def __init__(self, reference: Path, tied: bool) -> None:
        super().__init__(reference)
        self.tied = tied

    def gradient_tolerance(self, step: int, name: str) -> float:
        """The first step's as in fp32, but for the tied weight's."""
        if step == 0 and not (self.tied and name == TIED):
            return parity.GRADIENT_TOLERANCE
        return 5 * LOW_TOLERANCE


class Copies(parity.Callback):
    """After each step the copies of a tied weight are their owner's, bit for bit."""

    def on_step_end(self, trainer) -> None:
        """Compares them over the stages."""
        shared = trainer.engine.shared_parameters()
        values = [v for held in trainer.run.mesh.gather_over_pp(hashes(shared)) for v in held.items()]
        assert len(set(values)) == len({name for name, _ in values}), "a copy differs from its owner"


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A hash of each."""
    return {name: content_hash([tensor]) for name, tensor in tensors.items()}


def tied_gradient_not_summed(trainer) -> None:
    """The head's part of the tied weight's gradient never reaches the owner."""
    _change_stages(trainer, "sum_tied", lambda gradients: None)


def copy_not_refreshed(trainer) -> None:
    """The head goes on with the weight of the step before."""
    _change_stages(trainer, "refresh_tied", lambda parameters: None)


def _change_stages(trainer, name, function) -> None:
    object.__setattr__(trainer.engine._split.stages, name, function)


def copy_counted_in_the_norm(trainer) -> None:
    """The last stage adds its copy's gradient to the global norm."""
    stages, over_ranks = trainer.engine._split.stages, trainer.engine.norm_over_ranks
    sum_tied, copied = stages.sum_tied, []

    def keep(gradients):
        copied.extend(gradients[name].clone() for name in stages.shared(gradients) if not stages.owns(name))
        sum_tied(gradients)

    _change_stages(trainer, "sum_tied", keep)
    trainer.engine.norm_over_ranks = lambda norm: over_ranks(
        torch.linalg.vector_norm(torch.stack([norm.double(), *(g.double().norm() for g in copied)]))
    )


def stages_clip_by_their_own_norm(trainer) -> None:
    """Each rank takes the norm of what it holds for that of the model."""
    trainer.engine.norm_over_ranks = lambda norm: norm


def a_microbatch_counts_twice(trainer) -> None:
    """The loss of one of the micro-batches is scaled as if there were half as many."""
    scale_loss, calls = trainer.engine.scale_loss, []

    def twice(loss):
        calls.append(loss)
        return scale_loss(loss * 2) if len(calls) == 2 else scale_loss(loss)

    trainer.engine.scale_loss = twice


def gradients_summed_in_bf16(trainer) -> None:
    """FSDP2 alone adds up what several passes for weights leave behind."""
    trainer.engine._accumulate_wide = lambda: None


@pytest.mark.case("B8", "G6", "I8")
def test_layouts_of_four_ranks_equal_one_process(world, reference, tmp_path):
    cells = {1: [cell("zero1", "zbv", tp=2, sequence_parallel=True)]}
    check_cells(world, reference("sgd"), tmp_path, "sgd", cells)


@pytest.mark.slow
@pytest.mark.case("B4", "B8", "G6", "I8")
def test_each_schedule_and_each_engine_with_other_axes_equals_one_process(world, reference, tmp_path):
    """A sample of the matrices below."""
    with_data = {2: [cell(engine, schedule) for engine, schedule in zip(ENGINES, SCHEDULES, strict=True)]}
    check_cells(world, reference("adamw"), tmp_path, "adamw", with_data)
    keys = {"tp": 2, "sequence_parallel": True}
    check_cells(
        world, reference("sgd"), tmp_path, "sgd", {2: [cell("fsdp2", "zbv", **keys), cell("zero1-cpu", "1f1b", tp=2)]}
    )


@pytest.mark.case("B4", "B8", "G6", "I8")
@pytest.mark.parametrize(
    ("engine", "pp"),
    tiers(product(["ddp", "fsdp2", "zero1"], [2, 4]), slow=[("zero1", 4)]),
)
def test_every_schedule_equals_one_process(world, reference, tmp_path, engine, pp):
    cells = {1: [cell(engine, schedule, pp=pp) for schedule in SCHEDULES]}
    check_cells(world, reference("sgd"), tmp_path, "sgd", cells)


@pytest.mark.case("B8", "G6", "I8")
@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_with_data_ranks_equals_one_process(world, reference, tmp_path, engine):
    cells = {2: [cell(engine, schedule) for schedule in SCHEDULES]}
    check_cells(world, reference("adamw"), tmp_path, "adamw", cells)


@pytest.mark.case("B8", "G6", "I8")
@pytest.mark.full
@pytest.mark.parametrize(("engine", "how"), list(product(ENGINES, ["tensor", "sequence"])))
def test_tensor_ranks_in_stages_equal_one_process(world, reference, tmp_path, engine, how):
    keys = {"tp": 2, "sequence_parallel": how == "sequence"}
    cells = {1: [cell(engine, schedule, **keys) for schedule in ("1f1b", "interleaved_1f1b", "zbv")]}
    check_cells(world, reference("sgd"), tmp_path, "sgd", cells)


@pytest.mark.case("B8", "G6", "I8")
@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "how"), list(product(["zero1", "zero1-cpu", "fsdp2", "ddp"], ["tensor", "sequence"]))
)
def test_all_three_axes_equal_one_process(world, reference, tmp_path, engine, how):
    keys = {"tp": 2, "sequence_parallel": how == "sequence"}
    cells = {2: [cell(engine, schedule, **keys) for schedule in ("1f1b", "interleaved_1f1b", "zbv")]}
    check_cells(world, reference("sgd"), tmp_path, "sgd", cells)


@pytest.mark.case("B8", "H1")
@pytest.mark.parametrize("how", tiers([True, "selective"], slow=["selective"]))
def test_recomputed_layers_equal_one_process(world, reference, tmp_path, how):
    folder = reference("sgd")
    model = {"model": {"path": str(folder / "checkpoint"), "gradient_checkpointing": how}}
    cells = {1: [cell(engine, s) | model for engine in ("ddp", "fsdp2", "zero1") for s in ("1f1b", "zbv")]}
    check_cells(world, folder, tmp_path, "sgd", cells)


@pytest.mark.case("B8", "G1")
@pytest.mark.parametrize(("engine", "data", "ties"), tiers(product(BF16, [1, 2], ["tied", "untied"]), slow=BF16_SLOW))
def test_bf16_with_sums_in_fp32_equals_one_process(world, reference, tmp_path, engine, data, ties):
    tied = ties == "tied"
    folder = reference("sgd", "autocast" if engine in AUTOCAST else "bf16", tied=tied)
    cells = [cell(engine, schedule) | {"precision": {"dtype": "bf16"}} for schedule in SCHEDULES]
    everyone = world(run_cells, 2 * data, folder, tmp_path, data, "sgd", cells, None, tied)
    for sections, proofs in zip(cells, zip(*everyone, strict=True), strict=True):
        check_pipeline(proofs, sections, data)
        assert {proof["facts"].compute_dtype for proof in proofs} == {"bf16"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (tied_gradient_not_summed, f"gradient of {TIED} is off by"),
        (copy_not_refreshed, f"ranks 0, 1 hold different values of {TIED}"),
        (copy_counted_in_the_norm, "norms .* != "),
        pytest.param(stages_clip_by_their_own_norm, "norms .* != ", marks=pytest.mark.slow),
        pytest.param(a_microbatch_counts_twice, "gradient of .* is off by", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_detected(world, reference, tmp_path, fault, message):
    with pytest.raises(RankFailed, match=message):
        world(run_stages, 2, reference("sgd"), tmp_path, 1, "sgd", cell("ddp", "1f1b"), fault)


@pytest.mark.slow
def test_sums_in_bf16_are_detected(world, reference, tmp_path):
    sections = cell("fsdp2", "zbv") | {"precision": {"dtype": "bf16"}}
    with pytest.raises(RankFailed, match="gradient of .* is off by"):
        world(run_stages, 2, reference("sgd", "bf16"), tmp_path, 1, "sgd", sections, gradients_summed_in_bf16)


def check_cells(world, folder: Path, out: Path, optimizer: str, cells: dict[int, list[dict]]) -> None:
    """Runs the layouts of each number of data ranks in one world, whose ranks they share out alike."""
    for data, sections in cells.items():
        ranks = data * sections[0]["parallel"]["pp"] * sections[0]["parallel"].get("tp", 1)
        everyone = world(run_cells, ranks, folder, out, data, optimizer, sections, timeout_s=400.0)
        for each, proofs in zip(sections, zip(*everyone, strict=True), strict=True):
            check_pipeline(proofs, each, data)


def check_pipeline(proofs: Sequence[dict], sections: dict, data: int) -> None:
    """Each stage holds its own part and no more, the schedule has run, and the norm is one number."""
    parallel = sections["parallel"]
    pp, schedule = parallel["pp"], parallel["schedule"]
    names = {name for proof in proofs for name in proof["held"]}
    chunks = default_virtual_stages(schedule)
    microbatches = next_accepted(schedule, pp, chunks, at_least=-(-6 // data))  # The last step has 6 samples.
    peaks = simulate(make_schedule(schedule, pp, chunks, microbatches)).peak_in_flight
    owners: dict[str, set[int]] = {name: set() for name in names}
    for proof in proofs:
        facts, (pp_rank, _) = proof["facts"], proof["place"]
        assert facts.settings["parallel.pp"] == pp and facts.settings["parallel.tp"] == parallel.get("tp", 1)
        assert facts.group_size == data
        assert len(proof["held"]) < len(names)
        assert proof["peak"] == peaks[pp_rank]
        for name in proof["owned"]:
            owners[name].add(pp_rank)
    assert all(len(ranks) == 1 for ranks in owners.values()), "every parameter is some stage's, and of one alone"
    assert len({proof["norm"] for proof in proofs}) == 1, "bit for bit the same on all ranks"


def twenty_steps(out: Path, engine: str, optimizer: dict, sections: dict) -> tuple[list, dict]:
    """Losses and norms of 20 steps of two or more micro-batches, and the weights after them."""
    keys = {"batch": {"micro_size": 1}, "run": {"max_steps": 20}, "logging": {"every_steps": 1}}
    given = {"callbacks": [Copies()]} if sections else None
    trainer = make_trainer(
        "ddp", out, model=tiny_llama(layers=4), given=given, optimizer=optimizer, **ENGINES[engine] | sections | keys
    )
    trainer.train()
    return [(line.loss, line.grad_norm) for line in trainer.state.log_history], weights(trainer)


@pytest.fixture(scope="module")
def twenty_of_one(world, tmp_path_factory):
    """20 steps of one process by optimizer."""
    made: dict[str, tuple] = {}

    def run(optimizer: str) -> tuple:
        if optimizer not in made:
            out = tmp_path_factory.mktemp(optimizer)
            made[optimizer] = world(twenty_steps, 1, out, "ddp", LONG[optimizer], {})[0]
        return made[optimizer]

    return run


LONG_LAYOUTS = [(engine, "1f1b") for engine in ENGINES if engine != "zero1"]
LONG_LAYOUTS += [("zero1", schedule) for schedule in SCHEDULES]
LONG = {
    "sgd": {"name": "sgd", "lr": 0.02, "momentum": 0.9, "max_grad_norm": 0.5},
    "adamw": {"name": "adamw", "lr": 5e-4, "eps": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5},
}


@pytest.mark.case("B8", "I8")
@pytest.mark.parametrize(
    ("engine", "schedule", "optimizer"),
    tiers(
        [(*layout, optimizer) for layout in LONG_LAYOUTS for optimizer in LONG],
        slow=[("zero1", "zbv", "adamw"), ("fsdp2", "1f1b", "sgd"), ("zero1-cpu", "1f1b", "adamw")],
    ),
)
def test_twenty_steps_equal_one_process_and_copies_their_owners(
    world, twenty_of_one, tmp_path, engine, schedule, optimizer
):
    lines, final = twenty_of_one(optimizer)
    sections = cell(engine, schedule)
    for got_lines, got in world(twenty_steps, 4, tmp_path, engine, LONG[optimizer], sections):
        assert got_lines == [pytest.approx(line, rel=1e-5) for line in lines]
        assert largest_difference(got, final) <= parity.WEIGHT_TOLERANCE[optimizer]


def clipped(out: Path, engine: str, sections: dict) -> tuple[float, dict]:
    """Norm of one SGD step on TINY and D8, and the weights after it, the learning rate 1."""
    optimizer = {"name": "sgd", "lr": 1.0, "max_grad_norm": 0.1}
    trainer = make_trainer("ddp", out, **ENGINES[engine] | sections, optimizer=optimizer)
    return trainer.train().grad_norm, weights(trainer)


@pytest.mark.case("G6")
@pytest.mark.parametrize("engine", tiers(ENGINES, quick=["zero1"], slow=["ddp", "fsdp2"]))
def test_the_norm_counts_a_tied_weight_once_and_clips(world, tmp_path, engine):
    model = tiny_llama()
    _, norm, _ = oracle(model, D8)
    assert norm == pytest.approx(0.783778, abs=5e-7)
    for got, final in world(clipped, 2, tmp_path, engine, cell(engine, "1f1b")):
        assert got == pytest.approx(norm, rel=1e-6)
        moved = torch.cat([(final[name] - p.detach()).flatten() for name, p in model.named_parameters()])
        assert moved.norm().item() == pytest.approx(0.1, abs=1e-5)
