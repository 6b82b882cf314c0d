import dataclasses
import json

import pytest

from ds_trainer.metrics import EvalMetrics, MetricsWriter, StepMetrics, WindowMean, read_metrics

STEP = {"tokens": 20, "samples": 4, "step_s": 2.0, "input_wait_s": 0.5}
TAKE = {"step": 2, "epoch": 0.5, "lr": 1e-4, "grad_norm": 0.7, "memory_bytes": 1000}


@pytest.mark.case("B7")
def test_the_window_weights_each_step_by_its_label_tokens():
    window = WindowMean()
    window.add(loss_sum=90.0, num_tokens=30, **STEP)
    window.add(loss_sum=10.0, num_tokens=10, **STEP)
    metrics = window.take(**TAKE)
    assert metrics.loss == pytest.approx(100 / 40)
    assert metrics.num_tokens == 40


def test_the_next_window_knows_nothing_of_the_last():
    window = WindowMean()
    window.add(loss_sum=90.0, num_tokens=30, **STEP)
    window.take(**TAKE)
    window.add(loss_sum=8.0, num_tokens=4, **STEP)
    assert window.take(**TAKE).loss == pytest.approx(2.0)


def test_throughput_is_the_windows_work_over_its_time():
    window = WindowMean()
    window.add(loss_sum=1.0, num_tokens=1, tokens=10, samples=2, step_s=1.0, input_wait_s=0.0)
    window.add(loss_sum=1.0, num_tokens=1, tokens=50, samples=4, step_s=2.0, input_wait_s=0.6)
    metrics = window.take(**TAKE)
    assert metrics.tokens_per_s == pytest.approx(20.0)
    assert metrics.samples_per_s == pytest.approx(2.0)
    assert metrics.step_s == pytest.approx(1.5)
    assert metrics.input_wait_s == pytest.approx(0.3)


def test_a_skipped_step_is_counted_and_its_nan_loss_left_out():
    window = WindowMean()
    window.add(loss_sum=6.0, num_tokens=3, **STEP)
    window.add(loss_sum=float("nan"), num_tokens=5, skipped=True, **STEP)
    metrics = window.take(**TAKE)
    assert (metrics.loss, metrics.skipped, metrics.tokens) == (pytest.approx(2.0), 1, 40)


def test_a_window_without_label_tokens_has_no_loss():
    window = WindowMean()
    window.add(loss_sum=0.0, num_tokens=0, **STEP)
    assert window.take(**TAKE).loss is None


def test_what_is_written_is_read_back_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    evaluation = EvalMetrics(step=0, eval_loss=2.5, eval_num_tokens=100, eval_s=1.5, extra={"accuracy": 0.25})
    training = _metrics(step=1)
    with MetricsWriter(path) as writer:
        writer.write(evaluation)
        writer.write(training)
        first, second = read_metrics(path)  # before the file is closed: a killed run must leave its lines behind
    assert first == {"step": 0, "eval_loss": 2.5, "eval_num_tokens": 100, "eval_s": 1.5, "accuracy": 0.25}
    assert second == dataclasses.asdict(training)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_lacks_becomes_null(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(_metrics(step=1, grad_norm=bad))
    assert '"grad_norm": null' in path.read_text()
    assert json.loads(path.read_text())["loss"] == 2.0


def test_a_new_run_does_not_continue_the_file_of_the_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (7, 1):
        with MetricsWriter(path) as writer:
            writer.write(_metrics(step=step))
    assert [line["step"] for line in read_metrics(path)] == [1]


def _metrics(step: int, grad_norm: float = 0.7) -> StepMetrics:
    window = WindowMean()
    window.add(loss_sum=6.0, num_tokens=3, **STEP)
    return window.take(**(TAKE | {"step": step, "grad_norm": grad_norm}))
