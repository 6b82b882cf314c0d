import io
from dataclasses import replace

import pytest

from ds_trainer.callbacks.progress import Progress, summary
from ds_trainer.log import get_logger
from ds_trainer.metrics import StepMetrics

NUMBERS = {"lr": 2e-5, "grad_norm": 1.25, "num_tokens": 500, "tokens": 1000, "tokens_per_s": 1234.0}
TIMES = {"samples_per_s": 8.0, "step_s": 2.0, "input_wait_s": 0.5}


def metrics(step: int, loss: float | None = 1.5, skipped: int = 0) -> StepMetrics:
    return StepMetrics(step=step, epoch=0.1, loss=loss, skipped=skipped, memory_bytes=3_200_000_000, **NUMBERS, **TIMES)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(caplog):
    logger = get_logger()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_summary_names_every_number_of_the_window():
    assert summary(metrics(1)) == "loss 1.5000  lr 2.00e-05  grad norm 1.25  1,234 tok/s  input wait 25%  3.2 GB"
    assert summary(metrics(1, loss=None, skipped=2)).startswith("loss -")
    assert summary(metrics(1, loss=None, skipped=2)).endswith("skipped 2")


@pytest.mark.case("M3")
@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_norm_of_a_skipped_step_is_not_called_infinite(norm):
    assert "grad norm not finite  " in summary(replace(metrics(1), grad_norm=norm))


def test_a_terminal_gets_a_bar_with_the_windows_numbers(monkeypatch, log):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress(total_steps=4, bar=True) as progress:
        progress.step()
        progress.show(metrics(1))
    assert "1/4" in terminal.getvalue()
    assert "grad norm 1.25" in terminal.getvalue()
    assert not log.records


@pytest.mark.case("N12")
def test_elsewhere_every_window_is_a_line(log, clock):
    with Progress(total_steps=4, bar=True) as progress:
        for step, after_s in ((1, 1.0), (2, 1.0), (3, 10.0), (4, 0.0)):
            clock[0] += after_s
            progress.step()
            progress.show(metrics(step))
    lines = [record.getMessage() for record in log.records]
    assert [line.split(" [")[0] for line in lines] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert "[00:12<00:04]" in lines[2]  # three steps took 12 s, so the last one takes 4


@pytest.mark.case("N12")
def test_the_total_is_of_this_process(clock):
    with Progress(total_steps=6, bar=False, first_step=3) as progress:
        for step in (4, 5, 6):
            progress.step()
            progress.show(metrics(step))
        clock[0] += 60.0
        assert progress.total(6) == "3 steps in 01:00, evaluations and saves included: 50 tok/s on average"


def test_a_resumed_run_begins_at_its_step_and_reckons_with_its_own_steps_only(monkeypatch, log, clock):
    with Progress(total_steps=6, bar=True, first_step=3) as progress:
        clock[0] += 12.0
        progress.step()
        progress.show(metrics(4))
    assert "step 4/6 [00:12<00:24]" in log.records[0].getMessage()
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Progress(total_steps=6, bar=True, first_step=3) as progress:
        progress.step()
        progress.show(metrics(4))
    assert "4/6" in terminal.getvalue()


def test_without_a_bar_every_window_is_a_line_on_a_terminal_too(monkeypatch, log, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress(total_steps=3, bar=False) as progress:
        for step in (1, 2, 3):
            progress.step()
            progress.show(metrics(step))
    assert [record.getMessage().split()[1] for record in log.records] == ["1/3", "2/3", "3/3"]
    assert "|" not in terminal.getvalue()
