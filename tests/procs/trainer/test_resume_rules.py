"""What a resumed run may change and what it may not; what is kept, and what a finished run does."""

from __future__ import annotations

import logging

import pytest
import torch

from ds_trainer.callbacks.base import Callback
from ds_trainer.errors import CheckpointError, ConfigError
from ds_trainer.log import get_logger
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import samples, tiny_llama

ADAMW = {"name": "adamw", "lr": 1e-2, "eps": 1e-4}
ROWS = samples(24)


class Ids(Callback):
    """The samples of every step over all ranks, and the rate that the optimizer was given."""

    def __init__(self):
        self.steps, self.rates = [], []

    def on_pre_optimizer_step(self, trainer):
        self.rates.append([group["lr"] for group in trainer.engine.param_groups()])

    def on_step_end(self, trainer):
        sampler = trainer.run.train_loader.sampler
        mine = [i for ids in sampler.microbatches(trainer.state.global_step - 1) for i in ids]
        self.steps.append(sorted(i for ids in trainer.run.mesh.gather_over_world(mine) for i in ids))


def train(out, engine="ddp", stop_after=None, given=None, rows=ROWS, model=None, **sections):
    """Trains 3 epochs of 6 steps; `stop_after` ends this process's part after that step, which is saved."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    get_logger().addHandler(handler)
    ids = Ids()

    class Stop(Callback):
        def on_step_end(self, trainer):
            if trainer.state.global_step == stop_after:
                trainer.control.should_save = True
                raise_after_save.append(True)

        def on_save(self, trainer, folder):
            if raise_after_save:
                raise KeyboardInterrupt

    raise_after_save: list[bool] = []
    base = {
        "batch": {"global_size": 4, "micro_size": 2},
        "data": {"shuffle": True},
        "optimizer": ADAMW,
        "schedule": {"name": "cosine", "warmup_steps": 3},
        "run": {"epochs": 3, "max_steps": None},
        "checkpoint": {"every_steps": 0, "export": False},
    }
    sections = base | {name: base.get(name, {}) | section for name, section in sections.items()}
    trainer = make_trainer(
        engine, out, rows=rows, model=model, given={"callbacks": [ids, Stop()]} | (given or {}), **sections
    )
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert stop_after
    result = {
        "ids": ids.steps,
        "rates": ids.rates,
        "step": trainer.state.global_step,
        "history": trainer.state.log_history,
        "state": trainer.state,
        "weights": weights(trainer),
        "said": "\n".join(said),
    }
    trainer.close()
    return result


def run(world, ranks, *args, **kwargs):
    return world(_run, ranks, args, kwargs)[0]


def _run(args, kwargs):
    return train(*args, **kwargs)


AUTO = {"resume": "auto"}


@pytest.mark.case("C3", "A4")
@pytest.mark.parametrize("workers", tiers([0, 2], quick=[0]))
def test_samples_go_on_in_the_middle_of_an_epoch_twice_in_a_row(world, tmp_path, workers):
    data = {"num_workers": workers}
    straight = run(world, 2, tmp_path / "straight", data=data)
    assert [sorted(i for step in straight["ids"][k : k + 6] for i in step) for k in (0, 6, 12)] == [list(range(24))] * 3
    parts = [
        run(world, 2, tmp_path / "cut", stop_after=8, data=data),
        run(world, 2, tmp_path / "cut", stop_after=11, data=data, checkpoint=AUTO),
        run(world, 2, tmp_path / "cut", data=data, checkpoint=AUTO),
    ]
    assert [len(part["ids"]) for part in parts] == [8, 3, 7]
    assert sum((part["ids"] for part in parts), []) == straight["ids"]
    assert parts[-1]["history"] != [] and [m.loss for m in parts[-1]["history"]] == [
        m.loss for m in straight["history"]
    ]


@pytest.mark.case("C2")
@pytest.mark.parametrize("scheduler", tiers(["own", "torch"], quick=["own"]))
def test_learning_rates_go_on(world, tmp_path, scheduler):
    straight = world(train_with_scheduler, 1, tmp_path / "straight", scheduler, None, None)[0]
    first = world(train_with_scheduler, 1, tmp_path / "cut", scheduler, 5, None)[0]
    second = world(train_with_scheduler, 1, tmp_path / "cut", scheduler, None, "auto")[0]
    assert first["rates"] + second["rates"] == straight["rates"]
    assert len({rate for group in straight["rates"] for rate in group}) > 5, "the rates must change"
    assert largest_difference(second["weights"], straight["weights"]) == 0


def train_with_scheduler(out, scheduler, stop_after, resume):
    given, model = {}, tiny_llama()
    if scheduler == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given = {"optimizers": (optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18))}
    return train(out, model=model, stop_after=stop_after, given=given, checkpoint={"resume": resume})


@pytest.mark.slow
def test_another_micro_size_goes_on_at_the_same_sample(world, tmp_path):
    straight = run(world, 2, tmp_path / "straight")
    run(world, 2, tmp_path / "cut", stop_after=8)
    later = run(world, 2, tmp_path / "cut", batch={"micro_size": 1}, checkpoint=AUTO)
    assert later["ids"] == straight["ids"][8:]
    assert largest_difference(later["weights"], straight["weights"]) <= 1e-5


def refused(out, ranks, kwargs):
    with pytest.raises(CheckpointError) as caught:
        train(out, **kwargs)
    assert caught.value.on_all_ranks or ranks == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "changed, found, change",
    [
        ({"batch": {"global_size": 8}}, "batch.global_size is 8, and 4 in", "checkpoint.allow_global_size_change"),
        ({"run": {"seed": 1}}, "run.seed is 1, and 42 in", "set run.seed to 42"),
        ({"data": {"shuffle": False}}, "data.shuffle is False, and True in", "set data.shuffle to True"),
        ({"optimizer": {"name": "adam"}}, "optimizer.name is 'adam', and 'adamw' in", "optimizer.name"),
        ({"rows": ROWS[::-1]}, "the first, the middle or the last training sample is not", "set data.train as it was"),
        (
            {"run": {"max_steps": 1}, "schedule": {"warmup_steps": 1}},
            "checkpoint-2 is at step 2, and this run has 1 steps",
            "raise run.max_steps",
        ),
        ({"rows": ROWS[:20]}, "the training data has 20 samples, and had 24 in", "the data that it began with"),
    ],
)
def test_what_would_change_the_run_is_refused_and_named(world, tmp_path, changed, found, change):
    run(world, 2, tmp_path, stop_after=2)
    for text in world(refused, 2, tmp_path, 2, {**changed, "checkpoint": AUTO}):
        assert found in text and change in text


def test_what_may_change_is_said(world, tmp_path):
    run(world, 2, tmp_path, stop_after=2)
    said = run(world, 2, tmp_path, optimizer={"weight_decay": 0.5}, checkpoint=AUTO)["said"]
    assert "since checkpoint-2: optimizer.weight_decay 0.0 -> 0.5" in said


@pytest.mark.case("C1")
@pytest.mark.parametrize(
    ("before", "ranks", "after", "later_ranks"),
    tiers(
        [("zero2", 2, "zero2", 1), ("zero1", 2, "zero1", 4), ("zero3", 2, "zero1", 2), ("ddp", 2, "zero0", 2)],
        quick=[("zero2", 2, "zero2", 1)],
    ),
)
def test_another_layout_is_refused_naming_both_and_its_weights_are_offered(
    world, tmp_path, before, ranks, after, later_ranks
):
    saved = run(world, ranks, tmp_path, before, stop_after=4)
    batch = {"micro_size": 1}
    text = world(refused, later_ranks, tmp_path, later_ranks, {"engine": after, "batch": batch, "checkpoint": AUTO})[0]
    for layout, n in ((before, ranks), (after, later_ranks)):
        assert f"{n} data ranks, {'ddp' if layout == 'ddp' else f'deepspeed, ZeRO stage {layout[-1]}'}" in text
    assert "checkpoint.resume_weights_only" in text
    only = {"resume": "auto", "resume_weights_only": True}
    began = world(initial_weights, later_ranks, tmp_path, after, only)[0]
    assert largest_difference(began, saved["weights"]) == 0


def initial_weights(out, engine, checkpoint):
    batch = {"global_size": 4, "micro_size": 1}
    trainer = make_trainer(engine, out, rows=ROWS, optimizer=ADAMW, batch=batch, checkpoint=checkpoint)
    assert trainer.state.global_step == 0
    found = weights(trainer)
    trainer.close()
    return found


@pytest.mark.slow
def test_another_global_size_goes_on_at_the_same_sample_where_a_key_allows_it(world, tmp_path):
    straight = run(world, 2, tmp_path / "straight")
    run(world, 2, tmp_path / "cut", stop_after=8)
    allowed = {"resume": "auto", "allow_global_size_change": True}
    later = run(world, 2, tmp_path / "cut", batch={"global_size": 6, "micro_size": 1}, checkpoint=allowed)
    # 16 samples of epoch 2 are left: 6, 6, 4; then an epoch of 4 steps.
    assert [len(step) for step in later["ids"]] == [6, 6, 4, 6, 6, 6, 6]
    for epoch, part in ((straight["ids"][8:12], later["ids"][:3]), (straight["ids"][12:], later["ids"][3:])):
        assert sorted(sum(epoch, [])) == sorted(sum(part, []))
    assert later["step"] == 15 and later["state"].epoch == 3.0


def test_a_finished_run_trains_nothing_and_says_so(world, tmp_path):
    done = run(world, 2, tmp_path, checkpoint={"every_steps": 9})
    again = run(world, 2, tmp_path, checkpoint={"every_steps": 9, "resume": "auto"})
    assert again["ids"] == [] and again["step"] == 18
    assert "is the end of a finished run of 18 steps: nothing is left to train" in again["said"]
    assert largest_difference(again["weights"], done["weights"]) == 0


def test_a_run_that_starts_anew_does_not_mix_with_another_ones_checkpoints(world, tmp_path):
    run(world, 1, tmp_path, stop_after=2)
    assert "holds checkpoint-2 of an earlier run" in world(refused, 1, tmp_path, 1, {})[0]


def test_auto_starts_anew_where_there_is_nothing(world, tmp_path):
    assert run(world, 1, tmp_path, checkpoint=AUTO)["step"] == 18


def evaluated(out, load_best=False):
    """A metric of 5, 1, 2, 3, 4, 6: best at the second of six evaluations."""
    scores = iter([5, 1, 2, 3, 4, 6])
    metrics = {"compute_metrics": lambda prediction: {"score": next(scores)}, "eval_dataset": D8[:2]}
    evaluation = {
        "every_steps": 3,
        "batch_size": 1,
        "metric_for_best_model": "score",
        "greater_is_better": False,
    }
    checkpoint = {"every_steps": 3, "keep_last": 2, "load_best_model_at_end": load_best, "export": load_best}
    kept = {}

    class Watch(Callback):
        def on_save(self, trainer, folder):
            if trainer.state.global_step == 6:
                kept["weights"] = weights(trainer)

    result = train(out, given=metrics | {"callbacks": [Watch()]}, evaluation=evaluation, checkpoint=checkpoint)
    return result["state"], kept["weights"]


def test_the_best_checkpoint_and_the_last_ones_are_kept(world, tmp_path):
    state, _ = world(evaluated, 2, tmp_path)[0]
    assert (state.best_metric, state.best_global_step) == (1, 6)
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    kept = {path.name for path in tmp_path.glob("*checkpoint-*")}
    assert kept == {"checkpoint-6", "checkpoint-15", "checkpoint-18"}


def test_the_best_model_is_what_is_exported_where_that_is_asked_for(world, tmp_path):
    from transformers import AutoModelForCausalLM

    _, best = world(evaluated, 2, tmp_path, True)[0]
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert largest_difference(exported, best) == 0


def unknown_metric(out):
    with pytest.raises(ConfigError) as caught:
        train(out, given={"eval_dataset": D8[:2]}, evaluation={"every_steps": 3, "metric_for_best_model": "f1"})
    return str(caught.value)


def test_a_metric_that_no_evaluation_gives_is_named(world, tmp_path):
    assert all("f1" in text and "eval_loss" in text for text in world(unknown_metric, 2, tmp_path))
