"""Reading a slice of a tensor that a conversion makes reads only what the slice is made of."""

import pytest
import torch

from ds_trainer.layout import TensorSlice
from ds_trainer.models.lazy_tensor import LazyTensor, NotRecordedError


class Stored:
    """Lazy tensors, and how many elements were read of them."""

    def __init__(self, *tensors):
        self.read = 0
        self.tensors = tensors
        self.unread = [LazyTensor(tuple(t.shape), t.dtype, self._fill(t)) for t in tensors]

    def _fill(self, tensor):
        def fill(out, wanted):
            self.read += wanted.numel
            out.copy_(tensor[wanted.index])

        return fill


def matrices(number, rows=4, columns=6, dtype=torch.float32):
    return [torch.arange(rows * columns, dtype=dtype).view(rows, columns) + 100 * i for i in range(number)]


def as_merged_experts(tensors):
    gate, up = torch.stack(tensors[:3]), torch.stack(tensors[3:])
    return torch.cat([gate, up], dim=1)


STRUCTURAL = {
    "experts": (as_merged_experts, 6),
    "transposed experts": (lambda t: as_merged_experts(t).transpose(1, -1).contiguous(), 6),
    "stacked last": (lambda t: torch.stack(t, dim=-1), 3),
    "chunk": (lambda t: torch.chunk(torch.cat(t, dim=-1), 3, dim=-1)[1], 2),
    "split": (lambda t: torch.split(t[0], [1, 3], dim=0)[1].contiguous(), 1),
}
REDONE = {
    "interleaved": lambda t: t[0].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
    "interleaved and merged": lambda t: torch.cat([t[0].view(2, 2, 6).transpose(0, 1).reshape(4, 6), t[1]], dim=1),
    "cast": lambda t: t[0].to(torch.bfloat16),
    "one of several": lambda t: torch.unbind(t[0])[2],
}


def slices(shape):
    yield TensorSlice.whole(shape)
    yield TensorSlice(tuple(n // 2 for n in shape), tuple(n - n // 2 for n in shape))
    yield TensorSlice(tuple(n // 3 for n in shape), (1,) * len(shape))


@pytest.mark.parametrize(("make", "number"), STRUCTURAL.values(), ids=STRUCTURAL)
def test_a_rearrangement_reads_of_its_sources_what_the_box_holds_and_no_more(make, number):
    expected = make(matrices(number))
    for wanted in slices(expected.shape):
        stored = Stored(*matrices(number))
        made = make(stored.unread)
        assert (made.shape, made.dtype, made.sliceable, stored.read) == (expected.shape, expected.dtype, True, 0)
        assert torch.equal(made.read_slice(wanted), expected[wanted.index])
        assert stored.read == wanted.numel


@pytest.mark.parametrize("make", REDONE.values(), ids=REDONE)
def test_any_other_operation_is_redone_on_whole_tensors_and_says_so(make):
    expected, made = make(matrices(2)), make(Stored(*matrices(2)).unread)
    assert (made.shape, made.dtype, made.sliceable) == (expected.shape, expected.dtype, False)
    for wanted in slices(expected.shape):
        assert torch.equal(made.read_slice(wanted), expected[wanted.index])


def test_formats_are_joined_as_torch_joins_them():
    a, b = matrices(2)
    expected = torch.cat([a.bfloat16(), b])
    made = torch.cat(Stored(a.bfloat16(), b).unread)
    assert made.dtype == expected.dtype == torch.float32
    assert torch.equal(made.read_slice(TensorSlice.whole(made.shape)), expected)


def test_what_would_be_lost_is_refused():
    (source,) = Stored(*matrices(1)).unread
    with pytest.raises(NotRecordedError):
        torch.empty(4, 6, device="meta")[:2] = source[:2]
    with pytest.raises(NotRecordedError):
        source * torch.ones(6, device="meta")
