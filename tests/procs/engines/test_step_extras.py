"""Recomputation, compiled blocks, the chunked head and fused optimizers: the numbers stay, and the mechanism acts."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.errors import ModelError
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.layouts import CELLS, SHAPE
from tests.helpers.parity_runs import run_cell
from tests.helpers.runs import D8, collate, largest_difference, make_trainer, run_config, weights
from tests.helpers.shards_witness import ShardsWitness
from tests.helpers.tiers import tiers
from tests.helpers.tiny import oracle, tiny_llama

CHUNK = 7
ENGINES = ["ddp", "zero2", "zero3", "fsdp2"]


class Operators(TorchDispatchMode):
    """Counts operators, also by the columns of their results, and notes the most rows of logits, in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.most_logits = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if DTensor in types:  # It calls operators on plain tensors in turn.
            return NotImplemented
        out = operator(*args, **(kwargs or {}))
        self.calls[operator.name()] += 1
        if torch.is_tensor(out) and out.dim():
            self.calls[f"{operator.name()} x {out.shape[-1]}"] += 1
            # Not the head's transposed weight, which has as many rows as there are hidden units.
            if out.shape[-1] == SHAPE["vocab"] and out.shape[:-1] != (SHAPE["hidden"],):
                self.most_logits = max(self.most_logits, out.shape[:-1].numel())
        return out

    def products_by_activation(self) -> float:
        """Of a Llama's MLP, matrix products as wide as it is for each time its activation function ran."""
        width = SHAPE["intermediate"]
        return self.calls[f"aten::mm x {width}"] / self.calls[f"aten::silu x {width}"]


def run_with(reference: Path, out: Path, engine: str, sections: dict) -> tuple[int, float]:
    """A cell of the parity tests, which holds it against one process that does nothing of this."""
    cell = CELLS[engine] | sections
    cell["model"] = {"path": str(reference / "checkpoint")} | cell.get("model", {})
    with Operators() as operators:
        run_cell(reference, out, 2, "sgd", cell, ShardsWitness)
    return operators.most_logits, operators.products_by_activation()


@pytest.mark.parametrize("engine", tiers(ENGINES, slow=["zero3", "fsdp2"]))
def test_selective_recompute_and_a_chunked_head_give_the_numbers_of_one_process(world, references, tmp_path, engine):
    sections = {"model": {"gradient_checkpointing": "selective"}, "loss": {"chunk_tokens": CHUNK}}
    for most_logits, products_by_activation in world(run_with, 2, references("sgd", SHAPE), tmp_path, engine, sections):
        assert most_logits == CHUNK
        # Gate and up in the forward pass, the gradients of down and of its input; the activation in both passes.
        assert products_by_activation == 4 / 2


@pytest.mark.parametrize(
    ("engine", "how"),
    tiers(product(ENGINES, [False, True]), slow=[("ddp", False), ("ddp", True), ("fsdp2", True), ("zero3", True)]),
)
def test_full_recompute_computes_matrix_products_again_and_gives_the_same_numbers(
    world, references, tmp_path, engine, how
):
    ratio = 6 / 2 if how else 4 / 1
    sections = {"model": {"gradient_checkpointing": how}}
    for most_logits, got in world(run_with, 2, references("sgd", SHAPE), tmp_path, engine, sections):
        assert got == ratio
        assert most_logits > 10 * CHUNK


@pytest.mark.case("H1", "H4")
@pytest.mark.parametrize(
    ("engine", "how"),
    tiers(
        product(ENGINES, [True, "selective"]),
        quick=[("zero3", "selective")],
        slow=[("ddp", True), ("zero2", "selective"), ("fsdp2", True)],
    ),
)
def test_frozen_parameters_and_recompute_give_the_gradients_of_one_process(world, tmp_path, engine, how):
    model = partly_frozen_llama()
    loss, norm, gradients = oracle(model, D8)
    expected = {name: p.detach() - gradients.get(name, 0.0) for name, p in model.named_parameters()}
    for got_loss, got_norm, final in world(train_frozen, 2, tmp_path, engine, how):
        assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-6)
        assert largest_difference(final, expected) <= 1e-6


def partly_frozen_llama():
    """The embedding, which then has no gradient to pass on, and a part of each block."""
    model = tiny_llama(tied=False)
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
    return model


def train_frozen(out, engine, how):
    config = run_config(engine, out, model={"gradient_checkpointing": how})
    trainer = Trainer(model=partly_frozen_llama(), config=config, train_dataset=D8, data_collator=collate)
    state = trainer.train()
    return state.loss, state.grad_norm, weights(trainer)


@pytest.mark.case("H3")
@pytest.mark.parametrize("how", [False, True])
def test_parameters_that_no_loss_depends_on_are_named_under_ddp(world, tmp_path, how):
    world(refuse_unused, 2, tmp_path, how)


def refuse_unused(out, recompute):
    """Tied, partly frozen, recomputed: DDP takes it all, but for a branch that no sample takes."""
    with pytest.raises(ModelError, match="does not depend on 2 trained parameters: extra.weight, extra.bias"):
        train_with_branch(out, recompute, branch_is_trained=True)
    assert train_with_branch(out, recompute, branch_is_trained=False).global_step == 1


def train_with_branch(out, recompute, branch_is_trained):
    model = tiny_llama()
    model.model.layers[0].self_attn.requires_grad_(False)
    model.extra = nn.Linear(4, 1).requires_grad_(branch_is_trained)
    config = run_config("ddp", out, model={"gradient_checkpointing": recompute})
    return Trainer(model=model, config=config, train_dataset=D8, data_collator=collate).train()


@pytest.mark.parametrize("engine", tiers(ENGINES, quick=["fsdp2"]))
def test_predictions_are_whole_where_the_training_has_a_chunked_head(world, tmp_path, engine):
    for losses, shapes in world(evaluate_both, 2, tmp_path, engine):
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        assert losses[2] == pytest.approx(losses[0], rel=1e-6)
        assert shapes == [(8, 60, 65)]


def evaluate_both(out, engine):
    """Losses with whole logits, in chunks, and with predictions; the shapes of these."""
    losses, shapes = [], []

    def note(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    for chunk, metrics in ((None, None), (CHUNK, None), (CHUNK, note)):
        given = {"eval_dataset": D8, "compute_metrics": metrics}
        trainer = make_trainer(engine, out, given=given, loss={"chunk_tokens": chunk})
        losses.append(trainer.evaluate()["eval_loss"])
    return losses, shapes


@pytest.mark.parametrize("engine", tiers(ENGINES, quick=["zero2"]))
def test_a_fused_optimizer_runs_one_kernel_and_gives_the_same_weights(world, tmp_path, engine):
    for (fused, fused_calls), (plain, plain_calls) in world(with_and_without_fused, 2, tmp_path, engine):
        assert fused_calls > 0 == plain_calls
        assert largest_difference(fused, plain) <= 1e-5


def with_and_without_fused(out, engine):
    results = []
    for fused in (True, False):
        optimizer = {"name": "adamw", "lr": 1e-2, "eps": 1e-4, "fused": fused}
        trainer = make_trainer(engine, out, optimizer=optimizer, run={"max_steps": 3})
        with Operators() as operators:
            trainer.train()
        results.append((weights(trainer), operators.calls["aten::_fused_adamw_"]))
    return results


@pytest.mark.parametrize(
    ("engine", "recompute"),
    tiers(
        [("ddp", False), ("zero2", True), ("zero3", "selective"), ("fsdp2", "selective")],
        slow=[("zero3", "selective")],
    ),
)
def test_compiled_blocks_give_the_numbers_of_others_at_every_length(world, tmp_path, engine, recompute):
    for (plain, graphs), (compiled, compiled_graphs), after in world(
        train_compiled, 2, tmp_path, engine, recompute, timeout_s=280
    ):
        assert largest_difference(compiled, plain) <= 1e-5
        assert graphs == 0
        # Micro-batches of three lengths, with and without padding: the second length is compiled for every other.
        assert 1 <= compiled_graphs <= 3
        assert after == compiled_graphs, "evaluation compiles nothing"


def train_compiled(out, engine, recompute):
    results = []
    for compiled in (False, True):
        counters.clear()
        model = {"compile": compiled, "gradient_checkpointing": recompute}
        config = run_config(engine, out, model=model, run={"max_steps": 2}, optimizer={"lr": 0.1})
        trainer = Trainer(model=tiny_llama(), config=config, train_dataset=D8, eval_dataset=D8, data_collator=collate)
        while trainer.state.global_step < 2:
            trainer.train_step()
        results.append((weights(trainer), counters["stats"]["unique_graphs"]))
        trainer.evaluate()
    assert not counters["graph_break"]
    return *results, counters["stats"]["unique_graphs"]
