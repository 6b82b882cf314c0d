"""The same run through accelerate: its objects run it, and its numbers are one process's."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model

from ds_trainer.engines.accelerate import ddp as accelerate_ddp
from ds_trainer.engines.accelerate import deepspeed as accelerate_deepspeed
from ds_trainer.engines.accelerate import fsdp2 as accelerate_fsdp2
from tests.helpers.layouts import CELLS, SHAPE
from tests.helpers.parity_runs import run_cell
from tests.helpers.resume import check_resumed, killed_and_resumed, train
from tests.helpers.runs import largest_difference, make_trainer, weights
from tests.helpers.shards_witness import ShardsWitness, check_mechanism
from tests.helpers.tiers import tiers
from tests.helpers.tiny import tiny_llama
from tests.helpers.world import RankFailed

BACKENDS = {"ddp": "ddp", "zero0": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed", "zero2-cpu": "deepspeed"}


def through(backend: str) -> dict:
    return {"parallel": {"engine": "accelerate"}, "accelerate": {"backend": backend}}


ACCELERATE = {cell: CELLS[cell] | through(backend) for cell, backend in BACKENDS.items()}


def run_watched(*args):
    """`run_cell`, and how often accelerate was called; the environment must be left as it was."""
    before, threads = dict(os.environ), torch.get_num_threads()
    prepare = patch.object(Accelerator, "prepare", autospec=True, side_effect=Accelerator.prepare)
    backward = patch.object(Accelerator, "backward", autospec=True, side_effect=Accelerator.backward)
    with prepare as prepared, backward as run_backward:
        proof = run_cell(*args)
    left = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert not [name for name in left if name.startswith(("ACCELERATE_", "FSDP_"))], left
    assert torch.get_num_threads() == threads
    return proof | {"prepared": prepared.call_count, "backward": run_backward.call_count}


@pytest.mark.case("B8")
@pytest.mark.parametrize(
    ("cell", "optimizer"),
    tiers(
        product(ACCELERATE, ["adamw", "sgd"]),
        slow=[("zero3", "adamw"), ("ddp", "adamw"), ("zero2", "adamw"), ("zero0", "sgd"), ("zero2-cpu", "adamw")],
    ),
)
def test_two_ranks_equal_one_process(world, references, tmp_path, cell, optimizer):
    folder = references(optimizer, SHAPE)
    proofs = world(run_watched, 2, folder, tmp_path, 2, optimizer, ACCELERATE[cell], ShardsWitness)
    check_mechanism(cell, optimizer, proofs, ranks=2)
    for proof in proofs:
        assert proof["prepared"] == 1
        assert proof["facts"].group_size == 2, "accelerate's model must reduce over all ranks"
        if cell == "ddp":
            assert proof["facts"].engine == "DistributedDataParallel" and proof["backward"] > 0
        else:
            assert proof["facts"].engine == "DeepSpeedEngine" and proof["facts"].stage == int(cell[4])


@pytest.mark.case("C2", "C3")
@pytest.mark.parametrize("cell", tiers(["ddp", "powersgd", "zero3"], slow=["zero3"]))
def test_a_killed_run_goes_on_bit_for_bit(world, tmp_path, resume_checkpoint, cell):
    powersgd = {"ddp": {"bucket_cap_mb": 26, "comm_hook": "powersgd", "powersgd_rank": 2}} | through("ddp")
    sections = ACCELERATE.get(cell, powersgd)
    straight = world(train, 2, tmp_path / "straight", resume_checkpoint, sections, {})
    check_resumed(straight, killed_and_resumed(world, tmp_path / "cut", 2, resume_checkpoint, sections))


PAIRS: list[tuple[str, str, str, dict]] = [
    ("ddp", "bf16", "ddp", {}),
    ("zero2", "bf16", "deepspeed", {}),
    ("zero2", "fp32", "deepspeed", {}),
    ("zero3", "fp32", "deepspeed", {}),
    ("ddp", "fp32", "ddp", {}),
    ("ddp", "fp32", "ddp", {"ddp": {"comm_hook": "fp16"}}),
]


def one_after_the_other(out):
    """Every engine by itself and through accelerate, in one process, none of which is closed before the next."""
    PartialState()  # What TrainingArguments leaves behind: on CPU, of a single process.
    results, closed = [], []
    for i, (engine, dtype, backend, sections) in enumerate(PAIRS):
        for way in ({}, through(backend)):
            trainer = make_trainer(engine, out / f"{i}{len(way)}", precision={"dtype": dtype}, **sections, **way)
            formats = []
            trainer.run.model.model.layers[0].mlp.register_forward_hook(
                lambda module, inputs, output, formats=formats: formats.append(output.dtype)
            )
            trainer.train()
            results.append((trainer.state.loss, weights(trainer), set(formats), trainer.engine.facts().engine))
            closed.append((trainer, formats))
    trainer, formats = closed[1]
    formats.clear()
    trainer.close()
    trainer.run.model(input_ids=torch.ones(1, 2, dtype=torch.long))
    assert formats == [torch.float32], "a model that is given back runs without accelerate's autocast"
    return results


@pytest.mark.slow
def test_runs_through_accelerate_follow_one_another_in_one_process_and_equal_their_engines(world, tmp_path):
    for results in world(one_after_the_other, 2, tmp_path):
        for (_, dtype, *_), own, through_accelerate in zip(PAIRS, results[::2], results[1::2], strict=True):
            assert through_accelerate[0] == pytest.approx(own[0], rel=1e-6)
            assert largest_difference(through_accelerate[1], own[1]) < 1e-6
            assert through_accelerate[2:] == own[2:]
            assert own[2] == {{"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}
        assert largest_difference(results[-1][1], results[-3][1]) > 1e-5, "the compression must act"


def misjudged(module, backend, out, **arguments):
    """A run whose Accelerator is told something else about the device."""
    told = module.accelerate_arguments

    def other(resolved):
        asked = told(resolved)
        return replace(asked, accelerator=asked.accelerator | arguments)

    with patch.object(module, "accelerate_arguments", other):
        make_trainer("zero2" if backend == "deepspeed" else "ddp", out, **through(backend))


def ddp_without_cpu(out):
    misjudged(accelerate_ddp, "ddp", out, cpu=False)


def deepspeed_with_cpu(out):
    misjudged(accelerate_deepspeed, "deepspeed", out, cpu=True)


def other_native_key(out):
    make_trainer("zero2", out, **through("deepspeed"), native={"deepspeed": {"steps_per_print": 7}})


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (ddp_without_cpu, r"prepared a LlamaForCausalLM, and takes this rank for 0 of 1 in a .*\n.*\n.*engine to ddp"),
        (deepspeed_with_cpu, r"prepared a DistributedDataParallel.*\n.*deepspeed runs through DeepSpeedEngine"),
        (other_native_key, r"accelerate changed steps_per_print from 7 to inf\n.*\n.*parallel.engine to deepspeed"),
    ],
)
def test_what_accelerate_does_not_do_stops_the_run(world, tmp_path, run, found):
    with pytest.raises(RankFailed, match=found):
        world(run, 2, tmp_path)


def many_buckets(out, engine, cap):
    powersgd = {"comm_hook": "powersgd", "bucket_cap_mb": cap}
    make_trainer("ddp", out, model=tiny_llama(**SHAPE), ddp=powersgd, parallel={"engine": engine}, **ON_DDP[engine])


ON_DDP: dict[str, dict] = {"ddp": {}, "accelerate": {"accelerate": {"backend": "ddp"}}}


@pytest.mark.parametrize(("engine", "cap", "smallest"), [("ddp", 5, 5), ("accelerate", 25, 1)])
def test_power_sgd_in_several_buckets_is_refused_where_it_would_hang(world, tmp_path, engine, cap, smallest):
    with pytest.raises(
        RankFailed, match=rf"powersgd on cpu, with 19 MiB .* of {smallest} MiB\n.*\n.*bucket_cap_mb to 26"
    ):
        world(many_buckets, 2, tmp_path, engine, cap)


class OnCpu:
    """What accelerate's way to FSDP2 asks of an Accelerator, none of which gets there on CPU."""

    scaler, fp8_backend, mixed_precision, is_main_process = None, None, "no", True
    _get_named_parameters = Accelerator._get_named_parameters

    def __init__(self, fsdp_plugin, **options):
        self.state = SimpleNamespace(fsdp_plugin=fsdp_plugin, dynamo_plugin=TorchDynamoPlugin(backend="no"))
        self.backwards, self._models = 0, []

    def _prepare_one(self, item, first_pass=False):
        return item

    def prepare(self, model, optimizer):
        return Accelerator._prepare_fsdp2(self, model, optimizer)

    def backward(self, loss):
        self.backwards += 1
        loss.backward()


def cut_by_accelerate(*args):
    prepare = patch("accelerate.accelerator.fsdp2_prepare_model", side_effect=fsdp2_prepare_model)
    maker = patch.object(accelerate_fsdp2, "make_accelerator", lambda mesh, **options: OnCpu(**options))
    engine = patch("ds_trainer.trainer.setup.make_engine", accelerate_fsdp2.AccelerateFSDP2Engine)
    with prepare as prepared, maker, engine:
        return run_cell(*args) | {"prepared": prepared.call_count}


@pytest.mark.parametrize(
    ("reshard", "optimizer"),
    tiers(product([True, False], ["sgd", "adamw"]), slow=[(True, "adamw")]),
)
def test_what_accelerate_cuts_with_fsdp2_equals_one_process(world, references, tmp_path, reshard, optimizer):
    folder = references(optimizer, SHAPE)
    sections = {"parallel": {"engine": "fsdp2"}, "fsdp": {"reshard_after_forward": reshard}}
    for proof in world(cut_by_accelerate, 2, folder, tmp_path, 2, optimizer, sections, ShardsWitness):
        assert proof["prepared"] == 1
        facts = proof["facts"]
        assert facts.group_size == 2 and facts.param_bytes == pytest.approx(2 * proof["total"], rel=0.02)
