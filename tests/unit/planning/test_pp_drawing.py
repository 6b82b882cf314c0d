"""Timelines as text and as a picture."""

import re

import pytest
from matplotlib.colors import to_hex

from ds_trainer.planning.pp_drawing import as_text, plot_timeline, timeline_figure, title
from ds_trainer.planning.pp_schedules import NAMES, Kind, default_virtual_stages, make_schedule
from ds_trainer.planning.pp_timeline import Timeline, simulate
from tests.helpers.table import table


def timeline(name: str, ranks: int, microbatches: int, **times) -> Timeline:
    return simulate(make_schedule(name, ranks, default_virtual_stages(name), microbatches), **times)


def test_a_row_has_the_passes_of_a_rank_in_time():
    assert as_text(timeline("1f1b", 2, 3), width=60).splitlines() == [
        "rank 0  F0- F1- ........B0----- F2- B1----- ....B2-----",
        "rank 1  ....F0- B0----- F1- B1----- F2- B2----- ........",
    ]
    assert as_text(timeline("zbv", 2, 4), width=60).splitlines() == [
        "rank 0  F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2I1W1f3i3w3I2W2I3W3..",
        "rank 1  ..F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2I2i3I3W2w3W3",
    ]


@table("width", [80, 100, 120])
@table("name", NAMES)
def test_text_fits_the_width(name, width):
    for ranks, microbatches in ((2, 4), (4, 8), (8, 32), (12, 100)):
        rows = as_text(timeline(name, ranks, 2 * microbatches // ranks * ranks), width).splitlines()
        assert len(rows) == ranks
        assert max(map(len, rows)) <= width


@pytest.mark.parametrize("name", NAMES)
def test_text_with_numbers_has_every_pass_once(name):
    drawn = timeline(name, 4, 8)
    for row, spans in zip(as_text(drawn, width=400).splitlines(), drawn.spans, strict=True):
        found = re.findall(r"[FBIW]\d+", row.partition("  ")[2].upper())
        assert found == [f"{span.action.kind}{span.action.microbatch}" for span in spans]


def test_where_numbers_do_not_fit_there_are_letters_as_many_as_the_pass_is_long_and_dots_while_idle():
    drawn = timeline("1f1b", 4, 20)
    rows = [row.partition("  ")[2] for row in as_text(drawn, width=80).splitlines()]
    for row, idle in zip(rows, drawn.idle_of_ranks, strict=True):
        assert (row.count("F"), row.count("B")) == (20, 40)
        assert row.count(".") == pytest.approx(idle * drawn.length)


def test_of_a_long_step_the_beginning_and_the_end_are_drawn():
    drawn = timeline("gpipe", 4, 64)
    rows = [row.partition("  ")[2] for row in as_text(drawn, width=80).splitlines()]
    for rank, row in enumerate(rows):
        beginning, _, end = row.partition(" ~ ")
        assert beginning == "." * rank + "F" * (len(beginning) - rank)
        assert end == "B" * (len(end) - 2 * rank) + "." * 2 * rank


def test_stages_of_uneven_cost_are_drawn_as_long_as_they_are():
    first, last = as_text(timeline("gpipe", 2, 2, stage_costs=(1, 2.5)), width=80).splitlines()
    assert first.startswith("rank 0  F0- F1- ....")
    assert last == "rank 1  ....F0------- F1------- B0----------------- B1----------------- ........"


def boxes(axes) -> dict[str, int]:
    """Number of boxes of each colour."""
    found: dict[str, int] = {}
    for collection in axes.collections:
        color = to_hex(collection.get_facecolor()[0])
        found[color] = found.get(color, 0) + len(collection.get_paths())
    return found


@pytest.mark.parametrize(("name", "colors"), [("1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 6), ("dualpipev", 8)])
def test_a_picture_has_a_box_for_every_pass_in_the_colour_of_its_kind_and_stage(name, colors):
    drawn = timeline(name, 4, 8)
    figure = timeline_figure(drawn)
    (axes,) = figure.axes
    found = boxes(axes)
    assert len(found) == colors
    assert sum(found.values()) == sum(map(len, drawn.spans))
    numbers = sorted(int(text.get_text()) for text in axes.texts)
    assert numbers == sorted(span.action.microbatch for row in drawn.spans for span in row)
    assert axes.get_title(loc="left") == title(drawn)
    kinds = {span.action.kind for row in drawn.spans for span in row}
    legend = [text.get_text()[:1] for text in figure.legends[0].get_texts()]
    assert {kind for kind in Kind if kind in legend} == kinds


def test_a_long_step_is_drawn_in_lines_below_each_other_with_numbers():
    drawn = timeline("dualpipev", 8, 32)
    axes = timeline_figure(drawn).axes
    assert len(axes) == 2
    assert axes[0].get_xlim()[1] == axes[1].get_xlim()[0]
    assert axes[1].get_xlim()[1] == drawn.length
    assert all(ax.texts for ax in axes)


def test_the_title_says_bubble_and_micro_batches_in_flight():
    says = (
        "interleaved_1f1b: 4 ranks x 2 stages, 8 micro-batches, bubble 15.8%, at most 5.5 of them in flight on a rank"
    )
    assert title(timeline("interleaved_1f1b", 4, 8)) == says


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_tells_the_format_of_a_picture(tmp_path, suffix, begins):
    plot_timeline(timeline("1f1b", 2, 2), tmp_path / f"timeline{suffix}")
    assert (tmp_path / f"timeline{suffix}").read_bytes().startswith(begins)
