"""Engines and tensor-parallel ranks beyond the parity tests: equal replicas, norms, loss scales, gathers."""

from __future__ import annotations

import io
import logging
import re
from contextlib import nullcontext

import pytest
import torch

from ds_trainer.engines.ddp import DDPEngine
from ds_trainer.engines.fsdp2.engine import fsdp_modules
from ds_trainer.engines.replica_check import check_replicas
from ds_trainer.errors import EngineError
from ds_trainer.log import get_logger
from tests.helpers.overflow import three_steps
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiny import oracle, tiny_llama

LONG = {"max_steps": 4, "epochs": 4}


def parallel(engine: str, **keys) -> dict:
    return {"engine": engine if engine in ("ddp", "fsdp2") else "deepspeed", "tp": 2} | keys


def drifted(out, engines):
    """The errors of a drifted norm, and of a drifted copy of the only KV head, by engine."""
    texts = []
    for engine in engines:
        model = tiny_llama(num_key_value_heads=1)
        trainer = make_trainer(engine, out, model=model, parallel=parallel(engine))
        mesh = trainer.run.mesh
        trainer.train_step()
        check_replicas(trainer.engine, mesh, "step 1")
        for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
            master = trainer.engine.state().get(name, {}).get("master")  # Not every data rank owns a part of it.
            before = master and master.read().clone()
            if master is not None and mesh.grid.rank == 1:
                master.write(torch.nextafter(before, torch.tensor(torch.inf)))
            with pytest.raises(EngineError) as caught:
                check_replicas(trainer.engine, mesh, "step 1")
            texts.append(str(caught.value))
            if master is not None:
                master.write(before)
        check_replicas(trainer.engine, mesh, "step 1")
        trainer.close()
    return texts


@pytest.mark.case("I4")
def test_a_copy_that_has_drifted_by_one_bit_is_named_on_every_rank(world, tmp_path):
    texts, others = world(drifted, 2, tmp_path, ["ddp", "zero2", "zero3", "fsdp2"])
    assert texts == others
    for engine in range(4):
        norm, head = texts[2 * engine : 2 * engine + 2]
        assert "after step 1 ranks 0 and 1 hold different values of model.norm.weight" in norm
        assert "after step 1 ranks 0 and 1 hold different values of model.layers.0.self_attn.k_proj.weight" in head


def with_partial_gradients(out):
    """Sequence parallelism without the sum of the norms' gradients."""
    trainer = make_trainer("ddp", out, parallel=parallel("ddp", sequence_parallel=True))
    for module in trainer.run.model.modules():
        if hasattr(module, "stack"):
            module.stack.summed_gradients = lambda norm: nullcontext()
    with pytest.raises(EngineError) as caught:
        trainer.train_step()
    return str(caught.value)


@pytest.mark.case("I4")
def test_gradients_that_nobody_sums_make_copies_drift(world, tmp_path):
    for text in world(with_partial_gradients, 2, tmp_path):
        assert "norm.weight" in text and "of 5 parameters that they hold replicas of" in text


def begun(out, engines):
    """How far each engine's masters are from the checkpoint's values at the start of a bf16 run, and its format."""
    model = tiny_llama(num_key_value_heads=1)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []
    for engine in engines:
        model = tiny_llama(num_key_value_heads=1)
        trainer = make_trainer(
            engine, out, model=model, parallel=parallel(engine), precision={"dtype": "bf16"}, batch={"micro_size": 1}
        )
        found.append((largest_difference(weights(trainer), values), trainer.engine.facts().compute_dtype))
        trainer.train_step()
        trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.case("I2")
def test_a_tensor_ranks_masters_hold_every_bit_of_its_part(world, tmp_path):
    engines = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    for found in world(begun, 4, tmp_path, engines):
        assert found == [(0.0, "bf16")] * len(engines)


def in_turn(out):
    """Ranks over which gradients are reduced, first with tensor ranks, then without."""
    return [make_trainer("zero2", out, parallel={"tp": tp}).run.facts.group_size for tp in (2, 1)]


def test_an_engine_reduces_over_its_own_groups_whatever_an_earlier_one_had(world, tmp_path):
    assert world(in_turn, 2, tmp_path) == [[1, 2], [1, 2]]


def start(out, rank_apart):
    """What rank 0 prints about the layout; the error where a rank has been given other values."""
    load = DDPEngine.load

    def load_apart(engine, model, weights, split):
        load(engine, model, weights, split)
        if engine.mesh.grid.rank == rank_apart:
            model.model.norm.weight.data.add_(1.0)

    DDPEngine.load = load_apart  # Of this process, which ends with the test.
    lines = io.StringIO()
    get_logger().addHandler(logging.StreamHandler(lines))
    try:
        make_trainer("ddp", out, batch={"micro_size": 1}, parallel=parallel("ddp"))
    except EngineError as error:
        return str(error)
    return lines.getvalue()


@pytest.mark.slow
def test_each_data_rank_starts_from_what_the_others_of_its_tensor_rank_start_from(world, tmp_path):
    for text in world(start, 4, tmp_path, 3):
        assert "ranks [3] start with other parameters than rank 1" in text
    printed, *_ = world(start, 4, tmp_path, None)
    assert "DistributedDataParallel, 2 data rank(s) of 2 tensor ranks, compute in fp32" in printed
    first, second = re.search("all replicas start from hash (.*)/(.*)", printed).groups()
    assert first != second, "the two tensor ranks hold different parts"


def clipped(out, engine, norm_type, limit):
    optimizer = {"max_grad_norm": limit, "norm_type": norm_type}
    model = tiny_llama(num_key_value_heads=1)
    trainer = make_trainer(engine, out, model=model, optimizer=optimizer, parallel=parallel(engine))
    return trainer.train().grad_norm, weights(trainer)


@pytest.mark.case("G6", "I1")
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_the_largest_gradient_of_all_tensor_ranks_clips(world, tmp_path, engine):
    model = tiny_llama(num_key_value_heads=1)
    _, _, gradients = oracle(model, D8)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for norm, final in world(clipped, 2, tmp_path, engine, "inf", 0.01):
        assert norm == pytest.approx(largest, rel=1e-5)
        expected = {n: p.detach() - gradients[n] * 0.01 / (largest + 1e-6) for n, p in model.named_parameters()}
        assert largest_difference(final, expected) < 1e-6


def overflowed(out, engine):
    """Loss scales by step, where in the second one a gradient of tensor rank 1 alone is infinite; whether it acted."""
    trainer = make_trainer(engine, out, run=LONG | {"on_non_finite": "skip"}, parallel=parallel(engine))

    def spoil():
        if trainer.state.global_step == 1 and trainer.run.mesh.grid.tp_rank == 1:
            gradient = dict(trainer.run.model.named_parameters())["model.layers.0.mlp.up_proj.weight"].grad
            getattr(gradient, "_local_tensor", gradient)[0, 0] = torch.inf

    return three_steps(trainer, spoil)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_an_overflow_on_one_tensor_rank_skips_the_step_and_halves_the_loss_scale_on_all(world, tmp_path, engine):
    for scales, kept in world(overflowed, 2, tmp_path, engine):
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        assert kept == [False, True, False]


def with_frozen_start():
    """Its first attention is given hidden states that need no gradient."""
    model = tiny_llama(tied=False)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].input_layernorm.requires_grad_(False)
    return model


def train_frozen(out):
    trainer = make_trainer("zero3", out, model=with_frozen_start(), parallel={"tp": 2})
    return trainer.train().grad_norm, weights(trainer)


@pytest.mark.case("H4")
def test_zero3_reduces_what_it_gathers_together_once_it_is_there(world, tmp_path):
    model = with_frozen_start()
    _, norm, gradients = oracle(model, D8)
    expected = {name: p.detach() - gradients.get(name, 0.0) for name, p in model.named_parameters()}
    for got, final in world(train_frozen, 2, tmp_path):
        assert got == pytest.approx(norm, rel=1e-6)
        assert largest_difference(final, expected) < 1e-5


def wrapped_by_size(out):
    """Names of the modules that FSDP2 gathers by themselves, and the weights after a step."""
    fsdp = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1}
    trainer = make_trainer("fsdp2", out, parallel=parallel("fsdp2"), fsdp=fsdp)
    trainer.train_step()
    names = {module: name for name, module in trainer.run.model.named_modules()}
    return {names[part] for part in fsdp_modules(trainer.run.model)}, weights(trainer)


def test_fsdp2_gathers_column_layers_that_read_one_tensor_together(world, tmp_path):
    model = tiny_llama()
    _, _, gradients = oracle(model, D8)
    expected = {name: p.detach() - gradients[name] for name, p in model.named_parameters()}
    for names, final in world(wrapped_by_size, 2, tmp_path):
        assert {"model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.0.self_attn.o_proj"} <= names
        assert not any(name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) for name in names)
        assert largest_difference(final, expected) < 1e-5
