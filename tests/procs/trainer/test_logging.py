"""What is logged is the loss of all ranks and of the whole window; callbacks are called in order."""

import pytest

from ds_trainer.callbacks.base import Callback
from ds_trainer.metrics import read_metrics
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tiny import oracle, samples, tiny_llama

ROWS = samples(14)
STILL = {"lr": 1e-12}
"""Steps too small to move a weight in fp32: every step meets the first weights."""


class OnLog(Callback):
    def __init__(self):
        self.seen = []

    def on_log(self, trainer, metrics):
        self.seen.append(metrics)


@pytest.mark.case("B7")
@pytest.mark.parametrize("micro_size", [1, 2], ids=["accumulation-2", "accumulation-1"])
def test_the_logged_loss_is_the_token_mean_over_ranks_and_window(world, tmp_path, micro_size):
    per_step = []
    for first in (0, 4, 8, 12, 0):  # Four steps an epoch, the last of two samples.
        rows = ROWS[first : first + 4]
        tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
        per_step.append((oracle(tiny_llama(), rows)[0], tokens))
    windows = [per_step[:3], per_step[3:]]
    tokens = [sum(n for _, n in window) for window in windows]
    losses = [sum(loss * n for loss, n in window) / total for window, total in zip(windows, tokens, strict=True)]
    means = [sum(loss for loss, _ in window) / len(window) for window in windows]
    assert losses != pytest.approx(means, rel=1e-3), "a mean of the steps' means would differ"
    results = world(train_and_log, 2, tmp_path, micro_size)
    file = read_metrics(tmp_path / "metrics.jsonl")
    for history, seen in results:
        assert seen == history
        assert [line.step for line in history] == [3, 5]
        assert [line.loss for line in history] == pytest.approx(losses, rel=1e-6)
        assert [line.num_tokens for line in history] == tokens
    assert [line["loss"] for line in file] == [line.loss for line in results[0][0]]
    assert [line["num_tokens"] for line in file] == tokens


def train_and_log(out, micro_size):
    on_log = OnLog()
    trainer = make_trainer(
        "ddp",
        out,
        rows=ROWS,
        given={"callbacks": [on_log]},
        batch={"global_size": 4, "micro_size": micro_size},
        optimizer=STILL,
        run={"max_steps": 5},
        logging={"every_steps": 3},
    )
    return trainer.train().log_history, on_log.seen


class Order(Callback):
    """Writes down what is called, and at which step."""

    def __init__(self):
        self.calls = []


for event in [name for name in vars(Callback) if name.startswith("on_")]:

    def note(self, trainer, *args, event=event):
        self.calls.append((event, trainer.state.global_step))

    setattr(Order, event, note)


def test_callbacks_are_called_in_order_on_every_rank(world, tmp_path):
    def step(n):
        return [("on_step_begin", n), ("on_pre_optimizer_step", n), ("on_step_end", n + 1)]

    def evaluation(n):
        return [("on_prediction_step", n), ("on_evaluate", n)]

    for calls in world(order, 2, tmp_path):
        assert calls == [
            ("on_init_end", 0),
            ("on_train_begin", 0),
            *evaluation(0),
            ("on_epoch_begin", 0),
            *step(0),
            ("on_epoch_end", 1),
            ("on_log", 1),
            *evaluation(1),
            ("on_epoch_begin", 1),
            *step(1),
            ("on_epoch_end", 2),
            ("on_log", 2),
            *evaluation(2),
            ("on_train_end", 2),
        ]


def order(out):
    callback = Order()
    given = {"callbacks": [callback], "eval_dataset": D8[:2]}
    evaluation = {"at_start": True, "every_steps": 1, "at_end": True}
    make_trainer("ddp", out, given=given, evaluation=evaluation, run={"max_steps": 2}).train()
    return callback.calls
