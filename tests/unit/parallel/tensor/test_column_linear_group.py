"""Column layers that read one tensor are computed at once: the collectives that this takes, and what leaves a group."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor import collectives, column_linear_group
from ds_trainer.parallel.tensor.collectives import gather_sequence, scatter_sequence
from tests.helpers.column_blocks import BLOCKS, MLP, Attention, B, H, T, gathered, make, split
from tests.helpers.threads import Communication, local_part, on_threads

PAYLOAD = B * T * H * 4
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = ((kind, PAYLOAD) for kind in ("all-reduce", "all-gather", "reduce-scatter"))


def weight_gradients(block):
    return [parameter.grad for parameter in block.parameters()]


@pytest.fixture
def x():
    return torch.randn(B, T, H, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def grad():
    return torch.randn(B, T, H, generator=torch.Generator().manual_seed(2))


def dense_run(kind, x, grad):
    """Output, input gradient and weight gradients of the whole block."""
    block, x = make(kind), x.clone().requires_grad_()
    y = block(x)
    y.backward(grad)
    return y.detach(), x.grad, weight_gradients(block)


def assert_parts(got, expected, size):
    """The weights' gradients on the ranks are those of the whole block."""
    for rank, grads in enumerate(got):
        for i, (part, whole) in enumerate(zip(grads, expected, strict=True)):
            sharding = TensorSharding.even(tuple(whole.shape), int(i == len(expected) - 1), size)
            torch.testing.assert_close(part, local_part(whole, sharding, rank))


def block_on_rank(group, kind, x, grad, communication):
    block, x = split(make(kind), group), x.clone().requires_grad_()
    y = block(x)
    forward = communication.since_last() if group.rank() == 0 else None
    y.backward(grad)
    backward = communication.since_last() if group.rank() == 0 else None
    return y.detach(), x.grad, weight_gradients(block), (forward, backward)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_all_reduces_once_forward_and_once_backward(kind, size, x, grad, monkeypatch):
    y, of_x, of_weights = dense_run(kind, x, grad)
    ranks = on_threads(block_on_rank, size, kind, x, grad, Communication(monkeypatch))
    for got, got_of_x, _, _ in ranks:
        torch.testing.assert_close(got, y)
        torch.testing.assert_close(got_of_x, of_x)
    assert_parts([rank[2] for rank in ranks], of_weights, size)
    assert ranks[0][3] == ([ALL_REDUCE], [ALL_REDUCE])


def sequence_on_rank(group, kind, x, grad, keep, communication):
    """The region's gather included: backward its users' gradients go past it."""
    block = split(make(kind), group, sequence_parallel=True, keep=keep)
    shard, x = gathered(x, group)
    y = block(x)
    forward = communication.since_last() if group.rank() == 0 else None
    y.backward(scatter_sequence(grad, group))
    backward = communication.since_last() if group.rank() == 0 else None
    whole = [gather_sequence(part, T, group) for part in (y.detach(), shard.grad)]
    return *whole, weight_gradients(block), (forward, backward)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("keep", [False, True], ids=["gathered again", "kept"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_with_sequence_parallelism_a_block_gathers_and_reduce_scatters_in_both_directions(
    kind, keep, size, x, grad, monkeypatch
):
    y, of_x, of_weights = dense_run(kind, x, grad)
    ranks = on_threads(sequence_on_rank, size, kind, x, grad, keep, Communication(monkeypatch))
    for got, got_of_x, _, _ in ranks:
        torch.testing.assert_close(got, y)
        torch.testing.assert_close(got_of_x, of_x)
    assert_parts([rank[2] for rank in ranks], of_weights, size)
    forward, backward = ranks[0][3]
    assert forward == [ALL_GATHER, REDUCE_SCATTER]
    # The output's gradient, unless it is kept the input, and the input's gradient.
    assert backward == [ALL_GATHER, *([] if keep else [ALL_GATHER]), REDUCE_SCATTER]


@pytest.mark.parametrize("length", [1, 5])
def test_a_sequence_that_does_not_divide_is_padded_out_of_sight(length, x, grad):
    x, grad = x[:, :length], grad[:, :length]
    y, of_x, of_weights = dense_run(Attention, x, grad)

    def on_rank(group):
        block = split(make(Attention), group, sequence_parallel=True)
        shard, whole = gathered(x, group)
        out = block(whole)
        out.backward(scatter_sequence(grad, group))
        ends = [gather_sequence(part, length, group) for part in (out.detach(), shard.grad)]
        return *ends, weight_gradients(block)

    ranks = on_threads(on_rank, 3)
    for got, got_of_x, _ in ranks:
        torch.testing.assert_close(got, y)
        torch.testing.assert_close(got_of_x, of_x)
    assert_parts([rank[2] for rank in ranks], of_weights, 3)


@pytest.mark.parametrize("keep", [False, True])
def test_a_gathered_input_is_kept_for_the_backward_pass_only_where_asked(keep, x):
    def on_rank(group):
        block = split(make(MLP), group, keep=keep)
        _, whole = gathered(x, group)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            block.gate(whole)
        return (B, T, H) in saved, (B, T // 2, H) in saved

    assert on_threads(on_rank, 2) == [(keep, not keep)] * 2


class Order(TorchDispatchMode):
    """Matrix products, and what the ranks begin and wait for, in their order."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.events.append("product")
        return operator(*args, **(kwargs or {}))


def overlap_on_rank(group, kind, x, sequence_parallel):
    block = split(make(kind), group, sequence_parallel)
    order = Order()

    def watched(start, name):
        def started(*args):
            order.events.append(f"start {name}")
            pending = start(*args)
            wait = pending.wait
            pending.wait = lambda: order.events.append(f"wait {name}") or wait()
            return pending

        return started

    names = {"start_all_reduce": "sum", "start_reduce_scatter": "sum", "start_all_gather": "gather"}
    if sequence_parallel:
        _, x = gathered(x, group)
    else:
        x = x.clone().requires_grad_()
    outputs = [layer(x) for name, layer in block.named_children() if name != "out"]
    with pytest.MonkeyPatch.context() as patch:
        for function, name in names.items():
            patch.setattr(
                f"{column_linear_group.__name__}.{function}",
                watched(getattr(collectives, function), name),
            )
        with order:
            sum(output.sum() for output in outputs).backward()
    return order.events


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("kind", "layers"), [(MLP, 2), (Attention, 3)])
def test_the_sum_of_the_input_gradient_is_on_its_way_while_the_weights_gradients_are_computed(
    kind, layers, sequence_parallel, x
):
    # A group of one rank, so that one thread alone runs what is watched.
    events = on_threads(overlap_on_rank, 1, kind, x, sequence_parallel)[0]
    products = ["product"] * layers
    if sequence_parallel:
        expected = ["start gather", *products, "start sum", "wait gather", *products, "wait sum"]
    else:
        expected = [*products, "start sum", *products, "wait sum"]
    assert events == expected


def test_what_a_group_keeps_is_gone_once_it_was_taken(x):
    def on_rank(group):
        block, given = split(make(Attention), group), x.clone()
        with torch.no_grad():
            outputs = [block.q(given), block.k(given)]
            kept = weakref.ref(block.q.column_group._outputs[block.v])
            outputs.append(block.v(given))
        seen, taken = weakref.ref(given), weakref.ref(outputs[-1])
        same = kept() is outputs[-1]
        del given, outputs
        gc.collect()
        return same, seen() is None, taken() is None

    assert on_threads(on_rank, 2) == [(True, True, True)] * 2


class CrossAttention(Attention):
    """Keys and values of another tensor, in between queries of the first one."""

    def forward(self, x):
        q, k, v = self.q(x), self.k(x.flip(1)), self.v(x.flip(1))
        return self.out(q * k.softmax(1) + v)


class SharedKeys(Attention):
    """Its own keys are not asked for."""

    def forward(self, x):
        return self.out(self.q(x) * self.v(x))


@pytest.mark.parametrize(("kind", "groups"), [(CrossAttention, ["q", "k", "v"]), (SharedKeys, ["qv", "k"])])
def test_a_layer_that_reads_another_tensor_or_none_leaves_the_group_and_all_stays_right(
    kind, groups, x, grad, monkeypatch
):
    y, of_x, of_weights = dense_run(kind, x, grad)

    def on_rank(group):
        block, steps = split(make(kind), group), []
        for _ in range(3):
            block.zero_grad()
            given = x.clone().requires_grad_()
            out = block(given)
            out.backward(grad)
            steps.append((out.detach(), given.grad, weight_gradients(block)))
        names = {layer: name for name, layer in block.named_children()}
        left = ["".join(names[m] for m in layer.column_group.members) for layer in (block.q, block.k, block.v)]
        return steps, list(dict.fromkeys(left))

    for rank, (steps, left) in enumerate(on_threads(on_rank, 2)):
        assert left == groups
        for got, got_of_x, got_of_weights in steps:
            torch.testing.assert_close(got, y)
            torch.testing.assert_close(got_of_x, of_x)
            for i, (part, whole) in enumerate(zip(got_of_weights, of_weights, strict=True)):
                if whole is None:
                    assert part is None
                else:
                    torch.testing.assert_close(
                        part, local_part(whole, TensorSharding.even(tuple(whole.shape), i // 3, 2), rank)
                    )


def checkpointed_on_rank(group, kind, x, grad, communication):
    block, given = split(make(kind), group), x.clone().requires_grad_()
    y = checkpoint(block, given, use_reentrant=False)
    y.backward(grad)
    calls = communication.since_last() if group.rank() == 0 else None
    columns = next(block.children()).column_group
    kept = columns._input is not None or bool(columns._outputs)
    return y.detach(), given.grad, weight_gradients(block), (calls, kept, len(columns.members))


@pytest.mark.parametrize("kind", BLOCKS)
def test_recomputation_leaves_nothing_behind_and_keeps_the_group_together(kind, x, grad, monkeypatch):
    y, of_x, of_weights = dense_run(kind, x, grad)
    ranks = on_threads(checkpointed_on_rank, 2, kind, x, grad, Communication(monkeypatch))
    for got, got_of_x, _, (_, kept, members) in ranks:
        torch.testing.assert_close(got, y)
        torch.testing.assert_close(got_of_x, of_x)
        assert not kept and members == (2 if kind is MLP else 3)
    assert_parts([rank[2] for rank in ranks], of_weights, 2)
    # It stops before the output is computed again: the last tensor that the backward pass needs comes before that.
    assert ranks[0][3][0] == [ALL_REDUCE] * 2


@pytest.mark.parametrize("kind", [CrossAttention, SharedKeys])
def test_a_layer_that_leaves_the_group_is_recomputed_as_it_was_computed(kind, x, grad):
    y, of_x, _ = dense_run(kind, x, grad)

    def on_rank(group):
        block, steps = split(make(kind), group), []
        for _ in range(2):  # The first one finds that the layer does not belong to the group.
            given = x.clone().requires_grad_()
            out = checkpoint(block, given, use_reentrant=False)
            out.backward(grad)
            steps.append((out.detach(), given.grad))
        return steps

    for steps in on_threads(on_rank, 2):
        for got, got_of_x in steps:
            torch.testing.assert_close(got, y)
            torch.testing.assert_close(got_of_x, of_x)


def test_without_gradients_a_block_all_reduces_once(x, monkeypatch):
    communication = Communication(monkeypatch)

    def on_rank(group):
        with torch.no_grad():
            return split(make(MLP), group)(x)

    for y in on_threads(on_rank, 2):
        torch.testing.assert_close(y, make(MLP)(x).detach())
        assert not y.requires_grad
    assert communication.since_last() == [ALL_REDUCE]
