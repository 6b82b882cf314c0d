"""What each rank says it owns, put together, is one process's masters and moments."""

import pytest
import torch

from tests.helpers.runs import D8, ENGINES, largest_difference, make_trainer
from tests.helpers.tiny import oracle, tiny_llama

STEPS = 2
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
KEYS = ("master", "exp_avg", "exp_avg_sq")


def reference():
    model = tiny_llama()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    for _ in range(STEPS):
        optimizer.zero_grad()
        oracle(model, D8)
        optimizer.step()
    return {name: {"master": p.detach(), **optimizer.state[p]} for name, p in model.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_slices_of_all_ranks_make_the_masters_and_moments_of_one_process(world, tmp_path, engine):
    expected = reference()
    owned = world(own_state, 2, engine, tmp_path)
    replicated = engine in ("ddp", "zero0")
    # A rank that owns everything is complete by itself; otherwise each element has one owner.
    for ranks in [[rank] for rank in owned] if replicated else [owned]:
        for key in KEYS:
            whole = {name: torch.full_like(of[key], torch.nan).flatten() for name, of in expected.items()}
            for layout, state in ranks:
                assert {piece.name for piece in layout} == state.keys()
                for piece in layout:
                    assert piece.shape == expected[piece.name][key].shape
                    part = whole[piece.name][slice(*piece.flat)]
                    assert part.isnan().all(), "an element has two owners"
                    part.copy_(state[piece.name][key].flatten())
            got = {name: value.view_as(expected[name][key]) for name, value in whole.items()}
            assert not any(value.isnan().any() for value in got.values()), "an element has no owner"
            assert largest_difference(got, {name: of[key] for name, of in expected.items()}) <= 1e-5


def own_state(engine, out):
    optimizer = {"name": "adamw", **ADAMW}
    trainer = make_trainer(engine, out, optimizer=optimizer, run={"max_steps": STEPS})
    trainer.train()
    state = {
        name: {key: value.read().clone() for key, value in of.items() if key in KEYS}
        for name, of in trainer.engine.state().items()
    }
    return trainer.engine.parameter_layout(), state
