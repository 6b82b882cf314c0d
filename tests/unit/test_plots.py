import json

import matplotlib.image
import pytest

from ds_trainer.plots import PANELS, loss_figure, plot_run, training_figure

LINES = [
    {"step": 0, "eval_loss": 3.0},
    {"step": 1, "loss": 2.9, "lr": 1e-5, "grad_norm": 4.0, "tokens_per_s": 80.0, "memory_bytes": 2e9},
    {"step": 2, "loss": None, "lr": 2e-5, "grad_norm": None, "tokens_per_s": 90.0, "memory_bytes": 3e9},
    {"step": 3, "loss": 2.1, "lr": 1e-5, "grad_norm": 2.0, "tokens_per_s": 85.0, "memory_bytes": 3e9},
    {"step": 3, "eval_loss": 2.2},
]


def test_the_loss_curves_hold_the_runs_values():
    (axes,) = loss_figure(LINES).axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {"training": [[1, 2.9], [3, 2.1]], "evaluation": [[0, 3.0], [3, 2.2]]}
    assert [text.get_text() for text in axes.texts] == ["3.000", "2.200"]


def test_every_panel_holds_the_runs_values():
    panels = {axes.get_title(loc="left"): axes.lines[0].get_xydata().tolist() for axes in training_figure(LINES).axes}
    assert panels[PANELS["lr"]] == [[1, 1e-5], [2, 2e-5], [3, 1e-5]]
    assert panels[PANELS["grad_norm"]] == [[1, 4.0], [3, 2.0]]
    assert panels[PANELS["tokens_per_s"]] == [[1, 80.0], [2, 90.0], [3, 85.0]]
    assert panels[PANELS["memory_bytes"]] == [[1, 2.0], [2, 3.0], [3, 3.0]]


@pytest.mark.parametrize("lines", [LINES, LINES[1:2]], ids=["whole run", "one step, no evaluation"])
def test_the_pictures_are_written_at_readme_size(tmp_path, lines):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = plot_run(metrics, tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "training.png"]
    for path in paths:
        height, width, _ = matplotlib.image.imread(path).shape
        assert width >= 1000 and height >= 500
