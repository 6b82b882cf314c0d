"""Plots of a run, drawn from its `metrics.jsonl`. Pure; matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_COLOR, EVAL_COLOR, PANEL_COLOR, SKIP_COLOR = "#4C72B0", "#DD5143", "#3A7D5C", "#55565B"
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.8,
}
PANELS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "learning rate": lambda line: line["lr"],
    "gradient norm before clipping": lambda line: line["grad_norm"],
    "peak memory (GB)": lambda line: line["memory_bytes"] / 1e9,
    "tokens per second": lambda line: line["tokens_per_s"],
    "seconds per step": lambda line: line["step_s"],
    "waiting for input (% of a step)": lambda line: 100 * line["input_wait_s"] / line["step_s"],
}
LONG = 200
"""A curve of at least so many points is drawn thin, and the loss with its running mean."""


def plot_run(metrics_path: Path, out_dir: Path) -> list[Path]:
    """Draws the loss and the other metrics of a run by optimizer step.

    Args:
        metrics_path: The run's `metrics.jsonl`.
        out_dir: Folder for `loss.png` and `training.png`.

    Returns:
        The files written; none for a run that has logged nothing.
    """
    import matplotlib

    lines = read_metrics(metrics_path)
    if not lines:
        return []
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, draw in (("loss.png", loss_figure), ("training.png", training_figure)):
            path = out_dir / name
            draw(lines).savefig(path, dpi=150)
            paths.append(path)
    return paths


def loss_figure(lines: list[dict[str, Any]]) -> Figure:
    """Training loss as a curve; evaluation loss as points, of which the lowest is marked; skipped steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (token mean)")
    _draw_training(axes, *_series(lines, lambda line: line.get("loss")))
    _draw_evaluations(axes, *_series(lines, lambda line: line.get("eval_loss")))
    skipped = {line["step"]: line["skipped"] for line in lines if line.get("skipped")}
    if skipped:
        bottom = axes.get_xaxis_transform()
        label = f"not finite, skipped: {sum(skipped.values())}"
        axes.plot([*skipped], [0.02] * len(skipped), "x", color=SKIP_COLOR, transform=bottom, label=label)
    axes.margins(y=0.12)
    axes.locator_params("x", integer=True)
    axes.legend(frameon=False)
    return figure


def _draw_training(axes: Axes, steps: list[int], losses: list[float]) -> None:
    if len(steps) < LONG:
        _draw(axes, steps, losses, color=TRAIN_COLOR, label="training")
        return
    import numpy as np

    window = len(steps) // 50
    means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(steps, losses, color=TRAIN_COLOR, alpha=0.35, linewidth=0.7)
    axes.plot(steps[window - 1 :], means, color=TRAIN_COLOR, label=f"training, mean of {window} lines")


def _draw_evaluations(axes: Axes, steps: list[int], losses: list[float]) -> None:
    if not steps:
        return
    _draw(axes, steps, losses, color=EVAL_COLOR, label="evaluation", marker="o", markersize=4, linestyle="--")
    lowest = losses.index(min(losses))
    style: Any = {"color": EVAL_COLOR, "marker": "*", "markersize": 13, "linestyle": ""}
    axes.plot(steps[lowest], losses[lowest], label=f"lowest evaluation: step {steps[lowest]}", **style)
    for point in sorted({0, lowest, len(steps) - 1}):
        where = (steps[point], losses[point])
        above: Any = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center", "color": EVAL_COLOR}
        axes.annotate(f"{losses[point]:.3f}", where, **above)


def training_figure(lines: list[dict[str, Any]]) -> Figure:
    """One panel each for learning rate, gradient norm, memory, throughput, time of a step and wait for input."""
    from matplotlib.figure import Figure

    training = [line for line in lines if "lr" in line]
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    for axes, (title, read) in zip(figure.subplots(2, 3, sharex=True).flat, PANELS.items(), strict=True):
        steps, values = _series(training, read)
        _draw(axes, steps, values, color=PANEL_COLOR)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_ylim(0, 1.06 * max(values, default=0) or None)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.locator_params("x", integer=True)
    figure.supxlabel("optimizer step", fontsize=11)
    return figure


def _series(lines: list[dict[str, Any]], read: Callable[[dict], float | None]) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that have a value; a null gives no point."""
    points = [(line["step"], value) for line in lines if (value := read(line)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """Draws a curve; a single value as a dot."""
    if len(steps) == 1:
        style.setdefault("marker", "o")
    if len(steps) >= LONG:
        style.setdefault("linewidth", 0.9)
    axes.plot(steps, values, **style)
