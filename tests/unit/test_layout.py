"""Which part of which tensor a rank owns."""

import pytest

from ds_trainer.layout import ParameterSlice, even_flat_range, rows_covering


def test_a_whole_tensor_is_one_slice():
    piece = ParameterSlice.whole("w", (3, 4))
    assert piece == ParameterSlice("w", (3, 4), (0, 12))
    assert piece.numel == 12
    assert ParameterSlice.whole("scalar", ()).numel == 1


def test_a_flat_range_keeps_the_shape_it_was_cut_from():
    piece = ParameterSlice.flat_range("w", (3, 4), 5, 9)
    assert (piece.shape, piece.flat, piece.numel) == ((3, 4), (5, 9), 4)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [0, 1, 7, 12])
def test_even_ranges_cover_every_element_once_and_in_order(numel, parts):
    ranges = [even_flat_range(numel, parts, index) for index in range(parts)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    assert max(stop - start for start, stop in ranges) <= -(-numel // parts)


def test_only_the_last_ranges_are_short_or_empty():
    assert [even_flat_range(9, 4, index) for index in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 9)]


@pytest.mark.parametrize(
    ("shape", "flat", "rows"),
    [
        ((3, 4), (0, 12), (0, 3)),
        ((3, 4), (5, 7), (1, 2)),
        ((3, 4), (3, 9), (0, 3)),
        ((7,), (2, 5), (2, 5)),
        ((2, 3, 5), (14, 16), (0, 2)),
    ],
)
def test_rows_that_hold_a_flat_range(shape, flat, rows):
    assert rows_covering(shape, *flat) == rows
