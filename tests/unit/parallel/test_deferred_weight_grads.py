"""Gradients of weights that are put off: the same ones, at the time they are asked for, and what is kept until then."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from ds_trainer.parallel.deferred_weight_grads import defer_weight_gradients
from ds_trainer.parallel.pipeline.deferred_linear import enable_deferred_weight_gradients

HIDDEN = 6


class Both(torch.autograd.Function):
    """One node that computes the gradients of input and weight at once, and knows nothing of putting off."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class Stage(nn.Module):
    """Uses most of its parameters in a way that is awkward for a backward pass in two."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, HIDDEN)
        self.first, self.again, self.frozen, self.half_frozen = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.transposed = Conv1D(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.both = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.half_frozen.weight.requires_grad_(False)

    def forward(self, x, recompute=False):
        ids = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 9
        return self.head(checkpoint(self.inside, x, ids, use_reentrant=False) if recompute else self.inside(x, ids))

    def inside(self, x, ids):
        x = self.norm(torch.tanh(self.first(x + self.embedding(ids))))
        x = torch.tanh(self.again(self.half_frozen(self.again(x))))
        return Both.apply(self.transposed(self.frozen(x)), self.both)


def stages(dtype=torch.float64):
    torch.manual_seed(0)
    whole = Stage().to(dtype)
    in_two = copy.deepcopy(whole)
    enable_deferred_weight_gradients(in_two)
    return whole, in_two


def defer(stage):
    """Names of the parameters of which a backward pass that may put them off leaves no gradient."""
    return {name for name, parameter in stage.named_parameters() if parameter.grad is None and parameter.requires_grad}


PUT_OFF = {"first.weight", "first.bias", "again.weight", "again.bias", "half_frozen.bias"}
PUT_OFF |= {"transposed.weight", "transposed.bias"}


@pytest.mark.parametrize("needs_input", [True, False], ids=["inner-stage", "first-stage"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_over_micro_batches_equal_those_of_whole_backward_passes(recompute, needs_input):
    whole, in_two = stages()
    later = []
    for seed in range(3):
        x = torch.randn(2, 3 + seed, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        ours, theirs = (x.clone().requires_grad_(needs_input) for _ in range(2))
        whole(theirs, recompute).square().sum().backward()
        with defer_weight_gradients() as of_weights:
            in_two(ours, recompute).square().sum().backward()
        assert not needs_input or torch.equal(ours.grad, theirs.grad)
        later.append(of_weights)
    assert defer(in_two) == PUT_OFF | {"unused.weight", "unused.bias"}
    for of_weights in later:
        of_weights.accumulate()
    assert defer(in_two) == {"unused.weight", "unused.bias"}
    for name, parameter in whole.named_parameters():
        own = in_two.get_parameter(name).grad
        assert (own is None) == (parameter.grad is None), name
        assert own is None or torch.allclose(own, parameter.grad, rtol=1e-12, atol=1e-12), name


def test_outside_of_such_a_pass_nothing_is_put_off():
    whole, in_two = stages()
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    for stage in (whole, in_two):
        stage(x).square().sum().backward()
    assert all(
        torch.equal(in_two.get_parameter(n).grad, p.grad) for n, p in whole.named_parameters() if p.grad is not None
    )


@pytest.mark.parametrize("layer", [nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 4, bias=False), Conv1D(4, HIDDEN)])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_layers_compute_what_they_did(layer, autocast):
    whole, in_two = copy.deepcopy(layer), copy.deepcopy(layer)
    enable_deferred_weight_gradients(in_two)
    x = torch.randn(2, 3, HIDDEN)
    results = []
    for each in (whole, in_two):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = each(own)
        with defer_weight_gradients() as later:
            y.float().square().sum().backward()
        later.accumulate()
        results.append([y, own.grad, *(parameter.grad for parameter in each.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=1e-2 if autocast else 1e-6)


def test_hooks_of_a_weight_run_when_its_gradient_is_there():
    layer = nn.Linear(HIDDEN, HIDDEN)
    enable_deferred_weight_gradients(layer)
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    with defer_weight_gradients() as later:
        layer(torch.ones(1, HIDDEN)).sum().backward()
    assert seen == [None]  # torch runs them also where no gradient has come.
    later.accumulate()
    assert seen[1:] == [layer.weight.grad] and layer.weight.grad.any()


def test_between_the_two_passes_only_inputs_and_gradients_of_linear_layers_are_kept():
    layers = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Softmax(-1))
    enable_deferred_weight_gradients(layers)
    kept = []

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor
            kept.append(weakref.ref(self))

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        y = layers(torch.randn(2, HIDDEN, requires_grad=True))
    loss = y.square().sum()
    del y
    assert all(ref() is not None for ref in kept)
    with defer_weight_gradients():
        loss.backward()
    del loss
    assert not any(ref() is not None for ref in kept), "the graph is gone; two inputs and two gradients are held"


def test_a_layer_with_a_forward_of_its_own_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * F.linear(x, self.weight, self.bias)

    layer = Scaled(HIDDEN, HIDDEN)
    enable_deferred_weight_gradients(layer)
    assert type(layer) is Scaled


def test_a_pass_that_fails_does_not_put_off_those_after_it():
    layer = nn.Linear(HIDDEN, HIDDEN)
    enable_deferred_weight_gradients(layer)
    with pytest.raises(RuntimeError, match="scalar"), defer_weight_gradients():
        layer(torch.ones(1, HIDDEN)).backward()
    layer(torch.ones(1, HIDDEN)).sum().backward()
    assert layer.weight.grad.any()
