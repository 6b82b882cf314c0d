"""Layers split over tensor ranks put off their weights' gradients, and what has to be communicated for these alone."""

import pytest
import torch
import torch.distributed as dist

from ds_trainer.parallel.deferred_weight_grads import defer_weight_gradients
from ds_trainer.parallel.pipeline.deferred_linear import enable_deferred_weight_gradients
from ds_trainer.parallel.tensor.collectives import scatter_sequence
from tests.helpers.column_blocks import BLOCKS, B, H, T, gathered, make, split
from tests.helpers.threads import Communication

SEQUENCE = pytest.param(True, id="sequence-parallel")


def gradients(kind, sequence_parallel, in_two):
    """Of the input and the weights of a block; what the two passes have sent; which weights the first one left."""
    group = dist.group.WORLD
    block = split(make(kind), group, sequence_parallel)
    enable_deferred_weight_gradients(block)
    x, grad = (torch.randn(B, T, H, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    shard, given = gathered(x, group) if sequence_parallel else [x.requires_grad_()] * 2
    y = block(given)
    grad = scatter_sequence(grad, group) if sequence_parallel else grad
    with pytest.MonkeyPatch.context() as patch:
        sent = Communication(patch)
        if not in_two:
            y.backward(grad)
            return [shard.grad, *(weight.grad for weight in block.parameters())], sent.calls, None, None
        with defer_weight_gradients() as later:
            y.backward(grad)
        left = [weight.grad is None for weight in block.parameters()]
        at_first = sent.since_last()
        later.accumulate()
        return [shard.grad, *(weight.grad for weight in block.parameters())], at_first, sent.calls, left


def whole_and_in_two(sequence_parallel):
    return [[gradients(kind, sequence_parallel, in_two) for in_two in (False, True)] for kind in BLOCKS]


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, id="plain"), SEQUENCE])
def test_split_layers_put_off_their_weights_gradients_and_gather_inputs_for_them_only_then(world, sequence_parallel):
    for rank, blocks in enumerate(world(whole_and_in_two, 2, sequence_parallel)):
        for (expected, sent, _, _), (got, at_first, later, left) in blocks:
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert all(left)
            if rank == 0:
                kinds = [kind for kind, _ in later]
                assert kinds == (["all-gather"] if sequence_parallel else [])
                assert sorted(at_first + later) == sorted(sent)
