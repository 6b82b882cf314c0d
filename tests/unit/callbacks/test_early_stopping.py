"""Early stopping counts as transformers' does, and keeps its count."""

import math
import random
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback as HFEarlyStopping
from transformers import TrainerState as HFState

from ds_trainer.callbacks.best_metric import is_better, metric_value
from ds_trainer.callbacks.early_stopping import EarlyStoppingCallback
from ds_trainer.callbacks.trainer_state import TrainerControl
from ds_trainer.config.training_sections import EvaluationConfig
from ds_trainer.errors import ConfigError
from ds_trainer.metrics import EvalMetrics


def evaluation(value: float, step: int = 0) -> EvalMetrics:
    return EvalMetrics(step, eval_loss=1.0, eval_num_tokens=1, eval_s=1.0, extra={"eval_accuracy": value})


def stopper(patience: int, threshold: float = 0.0, metric: str = "accuracy") -> EarlyStoppingCallback:
    return EarlyStoppingCallback(
        EvaluationConfig(
            metric_for_best_model=metric,
            greater_is_better=True,
            early_stopping_patience=patience,
            early_stopping_threshold=threshold,
        )
    )


def stops_at(callback: EarlyStoppingCallback, values: list[float]) -> int | None:
    """Number of the evaluation that stops the training."""
    trainer = SimpleNamespace(control=TrainerControl())
    for number, value in enumerate(values):
        callback.on_evaluate(trainer, evaluation(value))
        if trainer.control.should_training_stop:
            return number
    return None


def hf_stops_at(patience: int, threshold: float, values: list[float]) -> int | None:
    callback, state, control = HFEarlyStopping(patience, threshold), HFState(), TrainerControl()
    args = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True)
    for number, value in enumerate(values):
        callback.on_evaluate(args, state, control, {"eval_accuracy": value})
        if control.should_training_stop:
            return number
        # As the HF Trainer does after each evaluation.
        state.best_metric = value if state.best_metric is None else max(value, state.best_metric)
    return None


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.0, 0.15])
def test_it_stops_where_transformers_stops(patience, threshold):
    stopped = set()
    for seed in range(50):
        values = [round(random.Random(seed * 100 + i).random(), 1) for i in range(12)]
        expected = hf_stops_at(patience, threshold, values)
        assert stops_at(stopper(patience, threshold), values) == expected, values
        stopped.add(expected)
    assert len(stopped) > 1


def test_a_slow_creep_below_the_threshold_is_no_gain():
    assert stops_at(stopper(patience=3, threshold=0.1), [0.0, 0.06, 0.12, 0.18]) == 3
    assert stops_at(stopper(patience=3), [0.0, 0.06, 0.12, 0.18]) is None


def test_nan_is_never_the_best():
    assert not is_better(math.nan, None, greater_is_better=True)
    assert not is_better(math.nan, 0.0, greater_is_better=False)
    assert stops_at(stopper(patience=2), [math.nan, 0.5, math.nan, 0.4]) == 3


def test_a_metric_that_the_evaluation_does_not_give_is_named_with_those_it_gives():
    with pytest.raises(ConfigError, match="metric_for_best_model = f1, and the evaluation has eval_loss, eval_accur"):
        stops_at(stopper(patience=1, metric="f1"), [0.5])


def test_a_metric_may_be_named_with_and_without_its_prefix():
    assert metric_value(evaluation(0.5), "accuracy") == metric_value(evaluation(0.5), "eval_accuracy") == 0.5
    assert metric_value(evaluation(0.5), "loss") == metric_value(evaluation(0.5), "eval_loss") == 1.0


def test_the_count_goes_on_from_its_state():
    values = [0.5, 0.4, 0.4, 0.4]
    before, after = stopper(patience=3), stopper(patience=3)
    assert stops_at(before, values[:3]) is None
    after.load_state_dict(before.state_dict())
    assert stops_at(after, values[3:]) == 0
    assert stops_at(stopper(patience=3), values[3:]) is None


def test_a_run_that_was_stopped_stays_so_unless_it_is_given_more_patience():
    stopped = stopper(patience=2)
    assert stops_at(stopped, [0.5, 0.4, 0.4]) == 2
    for patience, expected in ((2, True), (3, False)):
        trainer, resumed = SimpleNamespace(control=TrainerControl()), stopper(patience)
        resumed.load_state_dict(stopped.state_dict())
        resumed.on_train_begin(trainer)
        assert trainer.control.should_training_stop == expected
