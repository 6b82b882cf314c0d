"""fp16 with its dynamic loss scale, which no CPU has."""

import hashlib
from math import isfinite

import pytest

from tests.helpers.runs import D8, ENGINES, make_trainer
from tests.helpers.tiny import oracle, tiny_llama

pytestmark = pytest.mark.gpu

STEPS, SAVED = 16, 8
# So high that the first gradients overflow, and within reach of a scale at which they do not.
FP16 = {"dtype": "fp16", "loss_scale": {"initial_scale_power": 24}}


@pytest.mark.case("G3")
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "zero0"])  # It keeps no checkpoint in fp16.
def test_overflows_are_skipped_and_a_checkpoint_after_them_goes_on_bit_for_bit(gpu, tmp_path, engine):
    steps, weights, skipped = gpu(train, engine, tmp_path / "straight")
    assert 0 < skipped < STEPS
    assert steps[0][1:] == (None, float("inf")), "the first step overflows"
    assert all(loss is not None and isfinite(norm) for _, loss, norm in steps[-3:])
    first = next(loss for _, loss, _ in steps if loss is not None)
    assert first == pytest.approx(oracle(tiny_llama(), D8)[0], rel=1e-2), "no skipped step has moved a weight"
    assert steps[-1][1] < first
    saved = tmp_path / "straight" / f"checkpoint-{SAVED}"
    later_steps, later_weights, later_skipped = gpu(train, engine, tmp_path / "resumed", {"resume": str(saved)})
    assert later_steps[SAVED:] == steps[SAVED:]
    assert (later_weights, later_skipped) == (weights, skipped)


def train(engine, out, checkpoint=None):
    trainer = make_trainer(
        engine,
        out,
        # torch's other kernels add up a gradient in no fixed order.
        model=tiny_llama(attn_implementation="eager", attention_dropout=0.1),
        precision=FP16,
        optimizer={"name": "adamw", "lr": 1e-3},
        run={"max_steps": STEPS, "device": "cuda", "max_skipped_steps": STEPS},
        checkpoint={"every_steps": SAVED, **(checkpoint or {})},
    )
    state = trainer.train()
    digest = hashlib.sha256()
    for name, value in trainer.engine.full_parameters():
        digest.update(name.encode() + value.numpy().tobytes())
    trainer.close()
    return (
        [(line.step, line.loss, line.grad_norm) for line in state.log_history],
        digest.hexdigest(),
        state.skipped_steps,
    )
