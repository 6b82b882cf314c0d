import json

import matplotlib.image
import pytest

from ds_trainer.plots import PANELS, loss_figure, plot_run, training_figure


def training(step: int, loss: float | None, grad_norm: float | None = 4.0, skipped: int = 0, **numbers) -> dict:
    line = {"lr": 1e-5, "tokens_per_s": 80.0, "memory_bytes": 2e9, "step_s": 2.0, "input_wait_s": 0.5}
    return line | {"step": step, "loss": loss, "grad_norm": grad_norm, "skipped": skipped} | numbers


LINES = [
    {"step": 0, "eval_loss": 3.0},
    training(1, 2.9),
    training(2, None, None, skipped=2, lr=2e-5, tokens_per_s=90.0, memory_bytes=3e9, input_wait_s=1.0),
    training(3, 2.1, 2.0, tokens_per_s=85.0, memory_bytes=3e9),
    {"step": 3, "eval_loss": 2.2},
    training(4, 2.0),
    {"step": 4, "eval_loss": 2.3},
]


def curves(lines: list[dict]) -> dict:
    (axes,) = loss_figure(lines).axes
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_the_loss_curves_hold_the_values_of_the_run():
    found = curves(LINES)
    assert found["training"] == [[1, 2.9], [3, 2.1], [4, 2.0]]
    assert found["evaluation"] == [[0, 3.0], [3, 2.2], [4, 2.3]]


def test_the_lowest_evaluation_and_skipped_steps_are_marked():
    found = curves(LINES)
    assert found["lowest evaluation: step 3"] == [[3, 2.2]]
    assert [step for step, _ in found["not finite, skipped: 2"]] == [2]
    assert not any("evaluation" in label or "skipped" in label for label in curves([training(1, 2.9)]))


def test_of_many_evaluations_only_the_first_the_lowest_and_the_last_are_written_out():
    losses = [3.0, 2.5, 2.2, 2.1, 2.4, 2.6]
    (axes,) = loss_figure([{"step": step, "eval_loss": loss} for step, loss in enumerate(losses)]).axes
    assert [text.get_text() for text in axes.texts] == ["3.000", "2.100", "2.600"]


def test_a_long_run_has_its_running_mean_too():
    found = curves([training(step, float(step % 2)) for step in range(1, 401)])
    means = found["training, mean of 8 lines"]
    assert means[0] == pytest.approx([8, 0.5])
    assert means[-1] == pytest.approx([400, 0.5])


def test_every_panel_holds_the_values_of_the_run():
    panels = {axes.get_title(loc="left"): axes.lines[0].get_xydata().tolist() for axes in training_figure(LINES).axes}
    assert list(panels) == list(PANELS)
    assert panels["learning rate"] == [[1, 1e-5], [2, 2e-5], [3, 1e-5], [4, 1e-5]]
    assert panels["gradient norm before clipping"] == [[1, 4.0], [3, 2.0], [4, 4.0]]
    assert panels["tokens per second"] == [[1, 80.0], [2, 90.0], [3, 85.0], [4, 80.0]]
    assert panels["peak memory (GB)"] == [[1, 2.0], [2, 3.0], [3, 3.0], [4, 2.0]]
    assert panels["seconds per step"] == [[1, 2.0], [2, 2.0], [3, 2.0], [4, 2.0]]
    assert panels["waiting for input (% of a step)"] == [[1, 25.0], [2, 50.0], [3, 25.0], [4, 25.0]]


def test_a_run_that_has_logged_nothing_has_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path) == []


@pytest.mark.parametrize("lines", [LINES, LINES[1:2]], ids=["whole run", "one step, no evaluation"])
def test_the_pictures_are_written_at_readme_size(tmp_path, lines):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = plot_run(metrics, tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "training.png"]
    for path in paths:
        height, width, _ = matplotlib.image.imread(path).shape
        assert width >= 1000 and height >= 500
