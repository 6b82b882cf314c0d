"""transformers' own callbacks see what the run is, and what they ask for is done on every rank."""

from __future__ import annotations

import contextlib
import io

import pytest
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from ds_trainer.callbacks.base import Callback
from ds_trainer.errors import ConfigError
from ds_trainer.metrics import EvalMetrics
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tensorboard import scalars

# A rate at which the loss on the evaluation data falls at first and rises later.
RISING = {"lr": 30.0}


def trainer_with(callbacks, out, engine="ddp", given=None, **sections):
    return make_trainer(engine, out, given={"callbacks": callbacks, "eval_dataset": D8[:2]} | (given or {}), **sections)


class Witness(TrainerCallback):
    """Writes down what it is given at each event."""

    def __init__(self):
        self.events, self.seen = [], {}


def note(event):
    def method(self, args, state, control, **kwargs):
        self.events.append((event, state.global_step))
        self.seen[event] = (args, state, control, kwargs)

    return method


for event in [name for name in vars(TrainerCallback) if name.startswith("on_") and hasattr(Callback, name)]:
    setattr(Witness, event, note(event))


def witness(out):
    callback = Witness()
    sections = {
        "run": {"epochs": 2, "max_steps": None},
        "batch": {"global_size": 8, "micro_size": 2, "accumulation": 2},
        "evaluation": {"every_steps": 1},
        "checkpoint": {"every_steps": 1},
        "optimizer": {"lr": 0.25},
        "logging": {"run_name": "a run"},
    }
    trainer = trainer_with([callback], out, **sections)
    trainer.train()
    trainer.predict(D8[:2])
    return trainer, callback


def told_of_a_run(out):
    trainer, callback = witness(out)
    args, state, _, given = callback.seen["on_train_end"]
    assert isinstance(state, TrainerState)
    assert given["model"] is trainer.run.model
    assert given["optimizer"].param_groups is trainer.engine.param_groups()
    assert given["eval_dataloader"] is trainer.run.eval_loader
    history = [{**line} for line in state.log_history]
    return {
        "events": callback.events,
        "history": history,
        "ours": trainer.state.log_history,
        "logs": callback.seen["on_log"][3]["logs"],
        "metrics": callback.seen["on_evaluate"][3]["metrics"],
        "predicted": callback.seen["on_predict"][3]["metrics"],
        "args": args.to_dict(),
        "state": (state.max_steps, state.num_train_epochs, state.train_batch_size, state.epoch, state.logging_steps),
        "zero": (state.is_world_process_zero, state.is_local_process_zero),
    }


def test_a_callback_is_told_what_transformers_would_tell_it(world, tmp_path):
    results = world(told_of_a_run, 2, tmp_path)
    for rank, told in enumerate(results):
        events = [event for event, _ in told["events"]]
        assert told["events"][:2] == [("on_init_end", 0), ("on_train_begin", 0)]
        for event in ("on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_epoch_end"):
            assert [step for name, step in told["events"] if name == event] in ([0, 1], [1, 2]), event
        assert events.count("on_evaluate") == 2
        assert events.count("on_log") == 4  # two training lines, two evaluations
        assert events.index("on_log") < events.index("on_evaluate")
        assert events.count("on_prediction_step") == 3
        assert events[-2:] == ["on_prediction_step", "on_predict"]
        assert "on_save" in events
        training = [line for line in told["history"] if "loss" in line]
        ours = [line for line in told["ours"] if not isinstance(line, EvalMetrics)]
        assert [(line["step"], line["epoch"]) for line in training] == [(1, 1.0), (2, 2.0)]
        for key, name in (("loss", "loss"), ("grad_norm", "grad_norm"), ("learning_rate", "lr")):
            assert [line[key] for line in training] == [getattr(line, name) for line in ours]
        evaluations = [line for line in told["history"] if "eval_loss" in line]
        assert [(line["step"], line["epoch"]) for line in evaluations] == [(1, 1.0), (2, 2.0)]
        assert told["metrics"]["eval_loss"] == told["logs"]["eval_loss"] == evaluations[-1]["eval_loss"]
        assert told["predicted"].keys() == {"test_loss"}
        assert told["state"] == (2, 2, 2, 2.0, 1)
        assert told["zero"] == (rank == 0, rank == 0)
        assert told["args"]["process_index"] == rank
        expected = {
            "learning_rate": 0.25,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "max_steps": 2,
            "eval_steps": 1,
            "eval_strategy": "steps",
            "run_name": "a run",
            "world_size": 2,
            "bf16": False,
            "output_dir": str(tmp_path),
        }
        assert {name: told["args"][name] for name in expected} == expected


class AsksOnRankZero(TrainerCallback):
    def __init__(self):
        self.evaluated, self.logged, self.saved = [], [], []

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            control.should_evaluate = state.global_step == 1
            control.should_log = control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == 3
        return control

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.logged.append(state.global_step)


def ask_on_rank_zero(out):
    callback = AsksOnRankZero()
    sections = {"run": {"max_steps": 5}, "logging": {"every_steps": 100}, "evaluation": {"at_end": False}}
    state = trainer_with([callback], out, **sections).train()
    return state.global_step, callback.evaluated, callback.logged, callback.saved


def test_what_a_callback_asks_for_on_one_rank_is_done_on_all(world, tmp_path):
    for steps, evaluated, logged, saved in world(ask_on_rank_zero, 2, tmp_path):
        assert (steps, evaluated) == (3, [1])
        assert logged[0] == 2
        assert saved[0] == 2


def stop_early(out, theirs: bool):
    sections = {
        "optimizer": RISING,
        "run": {"max_steps": 10},
        "evaluation": {"every_steps": 1, "metric_for_best_model": "eval_loss"},
    }
    if theirs:
        trainer = trainer_with([EarlyStoppingCallback(2)], out, **sections)
    else:
        sections["evaluation"]["early_stopping_patience"] = 2
        trainer = trainer_with([], out, **sections)
    state = trainer.train()
    losses = [line.eval_loss for line in state.log_history if isinstance(line, EvalMetrics)]
    return losses, state.global_step, [callback.state_dict() for callback in trainer.callbacks]


def test_transformers_early_stopping_stops_where_ours_does(world, tmp_path):
    ours = world(stop_early, 2, tmp_path / "ours", False)
    theirs = world(stop_early, 2, tmp_path / "theirs", True)
    for (losses, steps, _), (their_losses, their_steps, states) in zip(ours, theirs, strict=True):
        assert losses == their_losses
        assert steps == their_steps == losses.index(min(losses)) + 3 < 10
        saved = states[-1]["EarlyStoppingCallback"][0]
        assert saved["attributes"] == {"early_stopping_patience_counter": 2}


def restore_a_counter(out):
    callback = EarlyStoppingCallback(early_stopping_patience=5)
    adapter = trainer_with([callback], out).callbacks[-1]
    adapter.load_state_dict({"EarlyStoppingCallback": [EarlyStoppingCallback(3).state() | {"attributes": {"x": 4}}]})
    assert (callback.x, callback.early_stopping_patience) == (4, 5)


def test_a_saved_attribute_is_set_and_a_new_argument_stays(world, tmp_path):
    world(restore_a_counter, 1, tmp_path)


def print_and_show(out):
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        trainer_with([PrinterCallback, ProgressCallback()], out, evaluation={"every_steps": 1}).train()
    return stdout.getvalue(), stderr.getvalue()


def test_transformers_printer_and_progress_bar_show_the_run(world, tmp_path):
    first, second = world(print_and_show, 2, tmp_path)
    assert "'loss': '" in first[0] and "'eval_loss': '" in first[0]
    assert "1/1" in first[1]
    assert second == ("", "")


def log_to_tensorboard(out):
    from transformers.integrations import TensorBoardCallback

    trainer_with([TensorBoardCallback()], out, run={"max_steps": 2}, optimizer={"lr": 0.5}).train()


def test_transformers_tensorboard_callback_writes_the_runs_numbers(world, tmp_path):

    world(log_to_tensorboard, 2, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert [event.value for event in scalars(folder, "train/learning_rate")] == [0.5, 0.5]


class StopsTheEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = True


def stop_the_epoch(out):
    with pytest.raises(ConfigError, match=r"StopsTheEpoch sets control.should_epoch_stop"):
        trainer_with([StopsTheEpoch()], out, run={"max_steps": 2}).train()


def test_the_end_of_an_epoch_before_its_end_is_refused(world, tmp_path):
    world(stop_the_epoch, 1, tmp_path)


class Empty(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        self.sizes = {parameter.numel() for parameter in model.parameters()}


def sizes_under_zero3(out):
    callback = Empty()
    trainer_with([callback], out, engine="zero3").train()
    return callback.sizes


def test_under_zero3_the_models_parameters_are_empty(world, tmp_path):
    assert world(sizes_under_zero3, 2, tmp_path) == [{0}, {0}]
