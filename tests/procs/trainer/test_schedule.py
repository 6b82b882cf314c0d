"""Steps, learning rates and sample order follow from the config alone."""

import math
from itertools import product

import pytest

from tests.helpers.runs import collate, make_trainer
from tests.helpers.tiers import tiers
from tests.helpers.tiny import samples

TEN = samples(10)
PEAK, FLOOR = 0.5, 0.1


def cosine(progress):
    return 0.5 * (1 + math.cos(math.pi * progress))


EXPECTED = {
    # 10 samples, global size 4: three steps an epoch, nine in all. Factor of each step, and after the last.
    "linear": ({"warmup_steps": 3}, [0, 1 / 3, 2 / 3, *((9 - k) / 6 for k in range(3, 10))]),
    "cosine": ({"warmup_ratio": 0.3}, [0, 1 / 3, 2 / 3, *(cosine((k - 3) / 6) for k in range(3, 10))]),
    "wsd": ({"warmup_steps": 1, "decay_ratio": 1 / 3}, [0, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0]),
    "constant": ({"warmup_steps": 2}, [0, 1 / 2, *[1] * 8]),
}
QUICK = [*((name, "ddp") for name in EXPECTED), ("cosine", "zero2")]


@pytest.mark.case("A9")
@pytest.mark.parametrize(("name", "engine"), tiers(product(EXPECTED, ["ddp", "zero2"]), quick=QUICK))
def test_every_step_has_its_rate_and_the_last_leaves_the_schedules_end(world, tmp_path, name, engine):
    section, factors = EXPECTED[name]
    floor = {} if name == "constant" else {"min_lr_ratio": FLOOR}
    warmup = factors.index(1)
    shares = [f if k < warmup or not floor else FLOOR + (1 - FLOOR) * f for k, f in enumerate(factors)]
    for rates, left, state in world(run_schedule, 2, engine, tmp_path, {"name": name, **section, **floor}):
        assert rates == pytest.approx([PEAK * share for share in shares[:-1]])
        assert left == pytest.approx([PEAK * shares[-1]] * len(left))
        assert (state.max_steps, state.global_step, state.epoch) == (9, 9, 3.0)


def run_schedule(engine, out, schedule):
    trainer = make_trainer(
        engine,
        out,
        rows=TEN,
        batch={"global_size": 4, "micro_size": 2},
        optimizer={"name": "adamw", "lr": PEAK},
        schedule=schedule,
        run={"max_steps": None, "epochs": 3},
    )
    state = trainer.train()
    return [line.lr for line in state.log_history], [g["lr"] for g in trainer.engine.param_groups()], state


QUICK = [*((name, "ddp") for name in EXPECTED), ("cosine", "zero2")]


@pytest.mark.case("A9")
def test_a_global_batch_larger_than_the_data_makes_one_step_an_epoch(world, tmp_path):
    for steps, left in world(few_samples, 2, tmp_path):
        assert (steps, left) == (3, 0.0)


def few_samples(out):
    trainer = make_trainer(
        "ddp",
        out,
        rows=TEN,
        batch={"global_size": None, "micro_size": 2, "accumulation": 4},
        schedule={"name": "linear"},
        run={"max_steps": None, "epochs": 3},
    )
    return trainer.train().global_step, trainer.engine.param_groups()[0]["lr"]


@pytest.mark.case("J7")
def test_three_epochs_are_three_permutations_cut_the_same_way_for_any_number_of_ranks(world, tmp_path):
    (one,) = world(order_of_samples, 1, tmp_path, 4, 7)
    ranks = world(order_of_samples, 2, tmp_path, 2, 7)
    other_seed = world(order_of_samples, 1, tmp_path, 4, 8)[0]
    for step, (all_at_once, parts) in enumerate(zip(one, zip(*ranks, strict=True), strict=True)):
        assert sorted(all_at_once) == sorted(sum(parts, [])), f"step {step}"
    epochs = [sum(one[k : k + 3], []) for k in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs), "nothing is repeated or skipped"
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert other_seed != one


def order_of_samples(out, micro_size, seed):
    """The numbers of the samples that this rank learned from, by step."""
    seen: list[int] = []

    def note(features):
        batch = collate([feature["row"] for feature in features])
        seen.extend(feature["number"] for feature in features)
        return batch

    trainer = make_trainer(
        "ddp",
        out,
        rows=[{"number": i, "row": row} for i, row in enumerate(TEN)],
        given={"data_collator": note},
        data={"shuffle": True},
        batch={"global_size": 4, "micro_size": micro_size},
        run={"max_steps": None, "epochs": 3, "seed": seed},
    )
    steps = []
    while trainer.state.global_step < trainer.state.max_steps:
        own = sum(trainer.run.train_loader.sampler.microbatches(trainer.state.global_step), [])
        seen.clear()
        trainer.train_step()
        assert seen == own or not own, "a rank without samples runs one that it does not learn from"
        steps.append(own)
    return steps
