"""Which part of which tensor a rank owns."""

from math import prod

import pytest
import torch

from ds_trainer.layout import ParameterSlice, TensorSharding, even_flat_range, rows_covering
from tests.helpers.shardings import SHARDINGS
from tests.helpers.table import table


def test_a_whole_tensor_is_one_slice():
    piece = ParameterSlice.whole("w", (3, 4))
    assert piece == ParameterSlice("w", (3, 4), (0, 12))
    assert piece.numel == 12
    assert ParameterSlice.whole("scalar", ()).numel == 1


def test_a_flat_range_keeps_the_shape_it_was_cut_from():
    piece = ParameterSlice.flat_range("w", (3, 4), 5, 9)
    assert (piece.shape, piece.flat, piece.numel) == ((3, 4), (5, 9), 4)


@table("parts", [1, 2, 3, 5, 8])
@table("numel", [0, 1, 7, 12])
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


@table("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_every_rank_s_local_shape_is_the_same_and_its_ranges_fit(sharding):
    for ranges in sharding.ranges:
        held = sum(stop - start for start, stop in ranges)
        assert held <= sharding.length == sharding.local_shape[sharding.dim]
    covered = {i for ranges in sharding.ranges for start, stop in ranges for i in range(start, stop)}
    assert covered == set(range(sharding.shape[sharding.dim]))


@table("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_parts_are_the_boxes_of_the_full_tensor_that_a_flat_range_of_the_local_one_holds(sharding):
    full = torch.arange(1, prod(sharding.shape) + 1).view(sharding.shape)  # 0 is padding.
    numel = prod(sharding.local_shape)
    for rank, ranges in enumerate(sharding.ranges):
        local = torch.zeros(sharding.local_shape, dtype=full.dtype)
        held = torch.cat([full.narrow(sharding.dim, start, stop - start) for start, stop in ranges], sharding.dim)
        local.narrow(sharding.dim, 0, held.shape[sharding.dim]).copy_(held)
        for start, stop in ((0, numel), (numel // 3, 2 * numel // 3), (numel - 1, numel), (1, 1), (1, numel - 1)):
            piece = ParameterSlice("w", sharding.shape, (start, stop), sharding, rank)
            parts, got = list(piece.parts()), torch.zeros(piece.numel, dtype=full.dtype)
            for part in parts:
                assert (part.of(got) == 0).all(), "an element is in two parts"
                part.of(got).copy_(full[part.slice.index])
            assert torch.equal(got, local.flatten()[start:stop])
            assert len({part.slice.offsets for part in parts}) == len(parts)
            assert len(parts) <= (2 * len(sharding.shape) - 1) * len(ranges)


def test_a_rank_that_holds_nothing_but_padding_has_no_part():
    sharding = TensorSharding.padded((5, 2), 4)
    assert not list(ParameterSlice("w", sharding.shape, (0, 4), sharding, 3).parts())


def test_a_scalar_is_one_part():
    (part,) = ParameterSlice.whole("scalar", ()).parts()
    assert part.of(torch.tensor([3.0])).shape == () and part.slice.index == ()


def test_copies_of_a_head_hold_the_same_range_on_neighbouring_ranks():
    assert TensorSharding.repeated((6, 4), 0, 4, units=2).ranges == (((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),))
