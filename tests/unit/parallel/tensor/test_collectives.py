"""Each collective's backward is the transpose of its forward, whatever the sequence's length."""

import pytest
import torch

from ds_trainer.parallel.tensor import collectives as c
from tests.helpers.table import table
from tests.helpers.threads import Communication, on_threads

B, T, H = 2, 5, 3
SIZES = [2, 3, 4]


def inputs(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def forward_and_backward(group, function, shape, *args):
    """This rank's input, output, the output's gradient and the input's."""
    x = inputs(group.rank(), *shape).requires_grad_()
    y = function(x, *args, group)
    grad = inputs(100 + group.rank(), *y.shape)
    y.backward(grad)
    return x.detach(), y.detach(), grad, x.grad


def run(size, function, shape, *args):
    """The same, of all ranks: four stacks."""
    return [
        torch.stack(parts)
        for parts in zip(*on_threads(forward_and_backward, size, function, shape, *args), strict=True)
    ]


def pad(x_BTH, size):
    return torch.nn.functional.pad(x_BTH, (0, 0, 0, -x_BTH.shape[-2] % size))


def shards(x_BTH, size):
    """Of one whole tensor each rank's positions."""
    return torch.stack(pad(x_BTH, size).chunk(size, 1))


def joined(x_rBtH, length=T):
    return torch.cat(list(x_rBtH), 1)[:, :length]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", [c.copy_to_group, c.sum_gradient])
def test_what_is_copied_sums_its_gradients(function, size):
    x, y, grad, of_x = run(size, function, (B, T, H))
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(of_x, grad.sum(0).expand_as(of_x))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_reduced_passes_its_gradient_on(size):
    x, y, grad, of_x = run(size, c.reduce_from_group, (B, T, H))
    torch.testing.assert_close(y, x.sum(0).expand_as(y))
    torch.testing.assert_close(of_x, grad)


@pytest.mark.parametrize("size", SIZES)
def test_the_last_dimension_is_joined_and_the_gradient_cut(size):
    x, y, grad, of_x = run(size, c.gather_last_dim, (B, T, H))
    torch.testing.assert_close(y, torch.cat(list(x), -1).expand_as(y))
    torch.testing.assert_close(of_x, torch.stack([grad[r].chunk(size, -1)[r] for r in range(size)]))


@pytest.mark.parametrize("size", SIZES)
def test_the_last_dimension_is_cut_and_the_gradient_joined(size):
    x, y, grad, of_x = run(size, c.scatter_last_dim, (B, T, H * size))
    torch.testing.assert_close(y, torch.stack([x[r].chunk(size, -1)[r] for r in range(size)]))
    torch.testing.assert_close(of_x, torch.cat(list(grad), -1).expand_as(of_x))


@table("size", SIZES)
@table("length", [1, 5, 12], ids=lambda length: f"T={length}")
def test_the_sequence_is_cut_and_the_gradient_joined(length, size):
    x, y, grad, of_x = run(size, c.scatter_sequence, (B, length, H))
    torch.testing.assert_close(y, torch.stack([shards(x[r], size)[r] for r in range(size)]))
    torch.testing.assert_close(of_x, joined(grad, length).expand_as(of_x))


@table("size", SIZES)
@table("length", [1, 5, 12], ids=lambda length: f"T={length}")
def test_the_sequence_is_joined_and_the_gradient_cut(length, size):
    x, y, grad, of_x = run(size, c.gather_sequence, (B, -(-length // size), H), length)
    torch.testing.assert_close(y, joined(x, length).expand_as(y))
    torch.testing.assert_close(of_x, torch.stack([shards(grad[r], size)[r] for r in range(size)]))


@table("size", SIZES)
@table("length", [1, 5, 12], ids=lambda length: f"T={length}")
def test_partial_sums_are_reduced_to_their_positions_and_the_gradient_joined(length, size):
    x, y, grad, of_x = run(size, c.reduce_scatter_sequence, (B, length, H))
    torch.testing.assert_close(y, shards(x.sum(0), size))
    torch.testing.assert_close(of_x, joined(grad, length).expand_as(of_x))


def test_a_rank_alone_communicates_nothing(monkeypatch):
    communication = Communication(monkeypatch)
    for function, *args in (
        (c.copy_to_group,),
        (c.sum_gradient,),
        (c.reduce_from_group,),
        (c.gather_last_dim,),
        (c.scatter_last_dim,),
        (c.scatter_sequence,),
        (c.gather_sequence, T),
        (c.reduce_scatter_sequence,),
    ):
        x, y, grad, of_x = run(1, function, (B, T, H), *args)
        assert torch.equal(x, y) and torch.equal(grad, of_x)
    assert communication.since_last() == []


def test_a_part_does_not_keep_the_whole_alive():
    def on_rank(group):
        return c.scatter_sequence(torch.randn(B, 8, H), group).untyped_storage().nbytes()

    assert on_threads(on_rank, 2) == [B * 4 * H * 4] * 2
