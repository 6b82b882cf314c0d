"""Pictures of a run, drawn from its `metrics.jsonl`. Pure; matplotlib is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_COLOR, EVAL_COLOR, PANEL_COLOR = "#4C72B0", "#DD5143", "#3A7D5C"
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.8,
}
PANELS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_s": "tokens per second",
    "memory_bytes": "peak memory (GB)",
}


def plot_run(metrics_path: Path, out_dir: Path) -> list[Path]:
    """Draws the loss, and the rest of a run's numbers, by optimizer step.

    Args:
        metrics_path: The run's `metrics.jsonl`.
        out_dir: Folder for `loss.png` and `training.png`.

    Returns:
        The files written.
    """
    import matplotlib

    lines = read_metrics(metrics_path)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, draw in (("loss.png", loss_figure), ("training.png", training_figure)):
            path = out_dir / name
            draw(lines).savefig(path, dpi=150)
            paths.append(path)
    return paths


def loss_figure(lines: list[dict[str, Any]]) -> Figure:
    """Training loss as a curve and evaluation loss as points, each with its value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (token mean)")
    _draw(axes, *_series(lines, "loss"), color=TRAIN_COLOR, label="training")
    steps, losses = _series(lines, "eval_loss")
    _draw(axes, steps, losses, color=EVAL_COLOR, label="evaluation", marker="o", linestyle="--")
    for step, loss in zip(steps, losses, strict=True):
        axes.annotate(
            f"{loss:.3f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="center", color=EVAL_COLOR
        )
    axes.margins(y=0.12)
    axes.locator_params("x", integer=True)
    axes.legend(frameon=False)
    return figure


def training_figure(lines: list[dict[str, Any]]) -> Figure:
    """One panel each for learning rate, gradient norm, throughput and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 2, sharex=True).flat, PANELS.items(), strict=True):
        steps, values = _series(lines, key)
        scale = 1e9 if key == "memory_bytes" else 1
        _draw(axes, steps, [value / scale for value in values], color=PANEL_COLOR)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.locator_params("x", integer=True)
    figure.supxlabel("optimizer step", fontsize=11)
    return figure


def _series(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that carry `key`; a null leaves no point."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """Draws a curve, with dots where it is too short to be one."""
    if len(steps) == 1:
        style.setdefault("marker", "o")
    axes.plot(steps, values, **style)
