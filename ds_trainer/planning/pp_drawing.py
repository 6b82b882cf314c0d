"""A timeline as text and as a picture. Pure; matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.planning.pp_schedules import Kind
from ds_trainer.planning.pp_timeline import Span, Timeline
from ds_trainer.plots import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_MOST_PER_PASS = 4
"""Characters of the shortest pass, at most: a letter, two digits and a space."""
_GAP = " ~ "


def as_text(timeline: Timeline, width: int) -> str:
    """One line per rank: F, B, I and W with the micro-batch's number, dots where the rank is idle.

    Passes of every second stage of a rank are in lower case. Where numbers do not fit, there are letters alone; where
    these do not fit, the middle of the step is left out.

    Args:
        timeline: What to draw.
        width: Characters of a line.
    """
    heads = [f"rank {rank}  " for rank in range(len(timeline.spans))]
    margin = max(map(len, heads))
    room = max(width - margin, 20)
    shortest = min(span.end - span.start for row in timeline.spans for span in row)
    per_pass = floor(room * shortest / timeline.length)
    has_numbers = per_pass >= len(f"F{timeline.schedule.num_microbatches - 1}")
    scale = (min(per_pass, _MOST_PER_PASS) if has_numbers else 1) / shortest
    rows = [_row(timeline, row, scale, has_numbers) for row in timeline.spans]
    if len(rows[0]) > room:
        start = (room - len(_GAP)) // 2
        rows = [row[:start] + _GAP + row[len(row) - (room - len(_GAP) - start) :] for row in rows]
    return "\n".join(head.ljust(margin) + row.rstrip() for head, row in zip(heads, rows, strict=True))


def _row(timeline: Timeline, spans: Sequence[Span], scale: float, has_numbers: bool) -> str:
    columns = ["."] * _column(timeline.length, scale)
    for span in spans:
        start, stop = _column(span.start, scale), _column(span.end, scale)
        columns[start:stop] = _cell(timeline, span, stop - start, has_numbers)
    return "".join(columns)


def _column(time: float, scale: float) -> int:
    return floor(time * scale + 0.5)


def _cell(timeline: Timeline, span: Span, size: int, has_numbers: bool) -> str:
    letter = str(span.action.kind)
    if _turn(timeline, span) % 2:
        letter = letter.lower()
    if not has_numbers:
        return letter * size
    text = f"{letter}{span.action.microbatch}"
    return text if len(text) == size else text.ljust(size - 1, "-") + " "


def _turn(timeline: Timeline, span: Span) -> int:
    """The number of the pass's stage among those of its rank."""
    return span.action.stage // timeline.schedule.num_ranks


_COLORS = {Kind.FORWARD: "#4C72B0", Kind.BACKWARD: "#3A7D5C", Kind.INPUT: "#C8553D", Kind.WEIGHT: "#DDA83C"}
_NAMES = {
    Kind.FORWARD: "F  forward",
    Kind.BACKWARD: "B  backward",
    Kind.INPUT: "I  backward, input",
    Kind.WEIGHT: "W  backward, weights",
}
_IDLE = "#EBEBEB"
_LIGHTEST = 0.55
"""How much white is in the colour of the last of a rank's stages."""
_HEIGHT = 0.86
_SMALLEST_TEXT = 5.0
"""Points; what would be smaller is left out."""
_PASSES_OF_LINE = 120
"""Shortest passes that have room for two digits side by side."""
_MOST_ROWS = 48
"""Rows up to which a long step is drawn in several lines."""


def plot_timeline(timeline: Timeline, path: Path) -> None:
    """Draws a timeline: one row per rank, a box per pass with its micro-batch's number.

    Args:
        timeline: What to draw.
        path: The picture; its suffix sets the file format.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        timeline_figure(timeline).savefig(path, dpi=150)


def timeline_figure(timeline: Timeline) -> Figure:
    """As wide as the step is long; a long one goes on in further lines, one below the other."""
    from matplotlib.figure import Figure

    num_ranks = timeline.schedule.num_ranks
    shortest = min(span.end - span.start for row in timeline.spans for span in row)
    num_passes = timeline.length / shortest
    num_lines = ceil(num_passes / _PASSES_OF_LINE)
    if num_lines * num_ranks > _MOST_ROWS:
        num_lines = 1  # Whatever is done, it is too much for numbers.
    in_line = timeline.length / num_lines
    width = min(max(9.0, 0.22 * num_passes / num_lines + 1.0), 18.0)
    of_row = 0.42 if num_ranks <= _MOST_ROWS // 3 else 0.2
    figure = Figure(figsize=(width, 1.1 + num_lines * (0.5 + of_row * num_ranks)), layout="constrained")
    lines = figure.subplots(num_lines, 1, squeeze=False)[:, 0]
    room = 72 * (width - 1.0) * shortest / in_line
    size = min(10.0, 1.45 * room / len(str(timeline.schedule.num_microbatches - 1)))
    for line, axes in enumerate(lines):
        start, stop = line * in_line, (line + 1) * in_line
        for rank, row in enumerate(timeline.spans):
            shown = [span for span in row if span.end > start and span.start < stop]
            _draw_boxes(axes, timeline, rank, shown, edge=min(0.7, room / 15))
            if size >= _SMALLEST_TEXT:
                complete = [span for span in shown if span.start >= start and span.end <= stop]
                _draw_numbers(axes, timeline, rank, complete, size)
        axes.set_xlim(start, stop)
        axes.set_ylim(num_ranks - 0.5, -0.5)
        axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        axes.tick_params(axis="y", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.grid(False)
    lines[0].set_title(title(timeline), loc="left", fontsize=12)
    lines[-1].set_xlabel("time, in forward passes of a stage")
    figure.legend(handles=_legend(timeline), loc="outside lower center", ncols=6, frameon=False, fontsize=10)
    return figure


def title(timeline: Timeline) -> str:
    """A schedule and what is to be known of it, on a line."""
    schedule = timeline.schedule
    several = f" x {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks{several}, {schedule.num_microbatches} micro-batches, "
        f"bubble {timeline.idle:.1%}, at most {max(timeline.peak_microbatches):g} of them in flight on a rank"
    )


def _draw_boxes(axes: Axes, timeline: Timeline, rank: int, row: Sequence[Span], edge: float) -> None:
    """In one call for all boxes of a colour: a step may have very many."""
    axes.barh(rank, timeline.length, height=_HEIGHT, color=_IDLE)
    boxes: dict[str, list[tuple[float, float]]] = {}
    for span in row:
        color = _color(timeline, span.action.kind, _turn(timeline, span))
        boxes.setdefault(color, []).append((span.start, span.end - span.start))
    for color, places in boxes.items():
        below = rank - _HEIGHT / 2
        axes.broken_barh(places, (below, _HEIGHT), facecolors=color, edgecolors="white", linewidth=edge)


def _draw_numbers(axes: Axes, timeline: Timeline, rank: int, row: Sequence[Span], size: float) -> None:
    from matplotlib.colors import to_rgb

    for span in row:
        is_light = sum(to_rgb(_color(timeline, span.action.kind, _turn(timeline, span)))) > 1.6
        style: Any = {"ha": "center", "va": "center", "size": size, "color": "#222222" if is_light else "white"}
        axes.text((span.start + span.end) / 2, rank, str(span.action.microbatch), **style)


def _color(timeline: Timeline, kind: Kind, turn: int) -> str:
    """The colour of a kind of pass; the lighter, the later in the model the stage is among those of its rank."""
    from matplotlib.colors import to_hex, to_rgb

    white = _LIGHTEST * turn / max(1, timeline.schedule.virtual_stages - 1)
    red, green, blue = (part + (1 - part) * white for part in to_rgb(_COLORS[kind]))
    return to_hex((red, green, blue))


def _legend(timeline: Timeline) -> list[Patch]:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for row in timeline.spans for span in row}
    handles = [Patch(facecolor=color, label=_NAMES[kind]) for kind, color in _COLORS.items() if kind in kinds]
    if timeline.schedule.virtual_stages > 1:
        last = timeline.schedule.virtual_stages - 1
        handles.append(Patch(facecolor=_color(timeline, Kind.FORWARD, last), label="lighter: later stage of the rank"))
    return [*handles, Patch(facecolor=_IDLE, label="idle")]
