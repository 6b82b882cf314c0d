"""Cross entropy of cut logits is that of the whole ones, and needs two sums over the ranks of numbers per position."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy_sum
from tests.helpers.table import table
from tests.helpers.threads import Communication, on_threads

B, T = 2, 7
# Of the largest element. fp32: the order of sums. bf16: the logits are exact in both, gradients are rounded to 8 bits.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def logits_and_labels(vocabulary, dtype, masked):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(B, T, vocabulary, generator=generator).mul(4).to(dtype)
    labels = torch.randint(0, vocabulary, (B, T), generator=generator)
    labels[0 if masked == "some" else slice(None)] = -100
    return logits, labels


def parallel_on_rank(group, logits, labels, smoothing, padding=100.0):
    """The sum and the gradient of this rank's columns, those of no token last, with any value."""
    columns = -(-logits.shape[-1] // group.size())
    padded = F.pad(logits, (0, columns * group.size() - logits.shape[-1]), value=padding)
    first = group.rank() * columns
    own = padded[..., first : first + columns].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy_sum(own, labels, first, logits.shape[-1], group, smoothing)
    (loss / 3).backward()
    return loss.detach(), own.grad


def whole(logits, labels, smoothing):
    logits = logits.clone().requires_grad_()
    flat = logits.float().flatten(0, -2)
    loss = F.cross_entropy(flat, labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (loss / 3).backward()
    return loss.detach(), logits.grad


# 5 tokens on 4 ranks: the third has one token and a column of padding, the last nothing but padding.
@table("size", [2, 3, 4])
@table("vocabulary", [24, 29, 5])
@table("dtype", TOLERANCE)
@table("masked", ["some", "all"])
@table("smoothing", [0.0, 0.1])
@pytest.mark.case("I6")
def test_the_sum_and_its_gradient_are_those_of_whole_logits(smoothing, masked, dtype, vocabulary, size):
    logits, labels = logits_and_labels(vocabulary, dtype, masked)
    expected, gradient = whole(logits, labels, smoothing)
    ranks = on_threads(parallel_on_rank, size, logits, labels, smoothing)
    assert all(torch.equal(loss, ranks[0][0]) for loss, _ in ranks) and ranks[0][0].dtype == torch.float32
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-6, atol=0)
    got = torch.cat([grad for _, grad in ranks], -1)
    assert got.dtype == dtype and not got[..., vocabulary:].any()
    error = (got[..., :vocabulary].float() - gradient.float()).abs().max()
    assert error <= TOLERANCE[dtype] * gradient.float().abs().max()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_overflow_nothing(scale):
    logits, labels = logits_and_labels(29, torch.float32, "some")
    logits += scale
    expected, gradient = whole(logits, labels, 0.0)
    for rank, (loss, grad) in enumerate(on_threads(parallel_on_rank, 2, logits, labels, 0.0, 10 * abs(scale))):
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(grad[..., : 15 - rank], gradient[..., rank * 15 : rank * 15 + 15])


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 2), (0.1, 3)])
def test_two_all_reduces_of_numbers_per_position_and_none_backward(smoothing, numbers, monkeypatch):
    communication = Communication(monkeypatch)
    on_threads(parallel_on_rank, 2, *logits_and_labels(24, torch.bfloat16, "some"), smoothing)
    assert communication.since_last() == [("all-reduce", B * T * 4), ("all-reduce", numbers * B * T * 4)]


class NewTensors(TorchDispatchMode):
    """Bytes of the tensors that hold one element per logit of this rank, made by either pass."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.made = shape, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.shape.numel() == self.shape.numel():
            self.made[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
        return out


def made_on_rank(group, logits, labels):
    logits = logits.clone().requires_grad_()
    with NewTensors(logits.shape) as forward:
        loss = vocab_parallel_cross_entropy_sum(logits, labels, 0, logits.shape[-1], group)
    del forward.made[logits.untyped_storage().data_ptr()]
    saved = [t for t in loss.grad_fn.saved_tensors if t.numel() == logits.numel()]
    with NewTensors(logits.shape) as backward:
        torch.autograd.grad(loss, logits)
    backward.made.pop(logits.untyped_storage().data_ptr())
    return forward.made, [t.data_ptr() == logits.data_ptr() for t in saved], backward.made


def test_either_pass_makes_one_fp32_tensor_as_large_as_the_logits_and_none_is_kept():
    ranks = on_threads(made_on_rank, 1, *logits_and_labels(24, torch.bfloat16, "some"))
    forward, saved_are_the_logits, backward = ranks[0]
    in_fp32 = B * T * 24 * 4
    assert list(forward.values()) == [in_fp32]
    assert saved_are_the_logits == [True]
    assert sorted(backward.values()) == [in_fp32 // 2, in_fp32], "and the gradient, in the format of the logits"
