"""Schedules on real ranks: the losses and gradients of one process, messages of any length, what is held until when."""

import weakref
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_trainer.errors import DataError, ModelError
from ds_trainer.parallel.pipeline.deferred_linear import enable_deferred_weight_gradients
from ds_trainer.parallel.pipeline.runtime import PipelineRuntime
from ds_trainer.planning.pp_schedules import forward_only, make_schedule, stages_of
from ds_trainer.planning.pp_timeline import simulate

INPUTS, HIDDEN, CLASSES = 5, 7, 3
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 3, "zbv": 2, "dualpipev": 2}
"""Schedule -> stages that each rank has."""
TOLERANCE = 1e-12


def make_stages(num_stages, hidden=(HIDDEN,)):
    """A model in stages of unequal sizes, the same on every rank; between them go (B, t, *hidden)."""
    torch.manual_seed(0)
    stages = []
    for stage in range(num_stages):
        width, size = 4 + stage, hidden[-1]
        layers = [nn.Linear(INPUTS if stage == 0 else size, width), nn.Tanh(), nn.Linear(width, size, bias=False)]
        layers += [nn.LayerNorm(size)] if stage % 2 else []
        layers += [nn.Linear(size, CLASSES)] if stage == num_stages - 1 else []
        stages.append(nn.Sequential(*layers).double())
    return stages


def make_batches(lengths, seed=0, streams=()):
    """Of each micro-batch inputs and labels; `lengths` are their samples and positions."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(*bt, *streams, INPUTS, generator=generator, dtype=torch.float64) for bt in lengths]
    labels = [torch.randint(CLASSES, (*bt, *streams), generator=generator) for bt in lengths]
    return list(zip(inputs, labels, strict=True))


def unequal(microbatches, seed):
    """Samples and positions of micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, 6, (2,), generator=generator).tolist()) for _ in range(microbatches)]


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def on_one_process(stages, batches):
    """The losses; gradients are left in the stages."""
    losses = [loss_of(nn.Sequential(*stages)(inputs), labels) for inputs, labels in batches]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def make_runtime():
    return PipelineRuntime(dist.group.WORLD, dist.group.WORLD, torch.device("cpu"))


def run(runtime, schedule, stages, batches, around=lambda stage, microbatch, call: call()):
    """The losses by micro-batch, on the last stage's rank."""
    losses = {}

    def forward(stage, microbatch, hidden):
        inputs, labels = batches[microbatch]
        output = around(stage, microbatch, lambda: stages[stage](inputs if hidden is None else hidden))
        if stage < schedule.num_stages - 1:
            return output
        loss = loss_of(output, labels)
        losses[microbatch] = loss.item()
        return loss

    runtime.run(schedule, forward, [inputs.shape[:2] for inputs, _ in batches])
    return losses


def largest_difference(stages, expected, own):
    """Between the gradients of this rank's stages and one process's; other stages must have none."""
    errors = []
    for number, (stage, whole) in enumerate(zip(stages, expected, strict=True)):
        for parameter, wanted in zip(stage.parameters(), whole.parameters(), strict=True):
            assert (parameter.grad is None) == (number not in own)
            if number in own:
                assert wanted.grad.any()
                errors.append((parameter.grad - wanted.grad).abs().max().item())
    return max(errors)


def two_runs(name, microbatches, hidden=(HIDDEN,)):
    """Two steps of unequal lengths, whose gradients are added up."""
    rank, ranks, chunks = dist.get_rank(), dist.get_world_size(), CHUNKS[name]
    own = stages_of(name, ranks, chunks, rank)
    stages, expected = make_stages(ranks * chunks, hidden), make_stages(ranks * chunks, hidden)
    for stage in stages:
        enable_deferred_weight_gradients(stage)
    runtime, schedule = make_runtime(), make_schedule(name, ranks, chunks, microbatches)
    errors = []
    for seed in range(2):
        batches = make_batches(unequal(microbatches, seed), seed, hidden[:-1])
        losses = run(runtime, schedule, stages, batches)
        wanted = on_one_process(expected, batches)
        assert sorted(losses) == (list(range(microbatches)) if schedule.num_stages - 1 in own else [])
        errors += [abs(losses[i] - wanted[i]) for i in losses]
    assert runtime.peak_in_flight == simulate(schedule).peak_in_flight[rank]
    return max(*errors, 0.0, largest_difference(stages, expected, own))


def all_schedules():
    """Largest differences from one process."""
    counts = {2: (4, 6), 4: (8,)}[dist.get_world_size()]
    found = {(name, m): two_runs(name, m) for name in CHUNKS for m in counts}
    return found | {"zbv, fewer than fill it": two_runs("zbv", 2), "streams": two_runs("1f1b", 4, (2, HIDDEN))}


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_of_every_schedule_equal_one_process(world, ranks):
    for differences in world(all_schedules, ranks):
        assert {case: error for case, error in differences.items() if not error <= TOLERANCE} == {}


class LiveBytes:
    """Counts what the graphs made in its block keep for their backward passes."""

    def __init__(self):
        self.live = self.peak = 0

    def block(self):
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def _keep(self, tensor):
        kept = Kept()
        kept.tensor = tensor
        self._add(tensor.nbytes)
        weakref.finalize(kept, self._add, -tensor.nbytes)
        return kept

    def _add(self, num_bytes):
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


class Kept:
    """Holds a tensor, and can be watched."""


def activations_held(name, microbatches):
    """Peak of the bytes kept for backward passes, in those of one micro-batch; what is left; what the runtime says."""
    ranks = dist.get_world_size()
    stages, batches = make_stages(ranks), make_batches([(2, 3)] * microbatches)
    live, of_one = LiveBytes(), []

    def around(stage, microbatch, call):
        before = live.live
        with live.block():
            output = call()
        of_one.append(live.live - before)
        return output

    runtime = make_runtime()
    run(runtime, make_schedule(name, ranks, 1, microbatches), stages, batches, around)
    assert len(set(of_one)) == 1 and of_one[0] > 0
    return live.peak / of_one[0], live.live, runtime.peak_in_flight


def activations_held_by_schedule(microbatches):
    return {name: activations_held(name, microbatches) for name in ("gpipe", "1f1b")}


def test_a_rank_holds_the_activations_of_all_micro_batches_in_gpipe_and_of_the_ranks_to_come_in_1f1b(world):
    ranks, microbatches = 4, 9
    for rank, held in enumerate(world(activations_held_by_schedule, ranks, microbatches)):
        assert held == {"gpipe": (microbatches, 0, microbatches), "1f1b": (ranks - rank, 0, ranks - rank)}


class Outlet(torch.autograd.Function):
    """Gives its input on in memory whose end can be seen."""

    @staticmethod
    def forward(ctx, x, ended):
        array = x.detach().numpy().copy()
        weakref.finalize(array, ended)
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def outputs_held(schedule):
    """The most of a stage's outputs that were there at once, and how many are left."""
    batches = make_batches([(2, 3)] * schedule.num_microbatches)
    changes = []

    def around(stage, microbatch, call):
        changes.append(1)
        return Outlet.apply(call(), lambda: changes.append(-1))

    run(make_runtime(), schedule, make_stages(schedule.num_stages), batches, around)
    return max(accumulate(changes)), sum(changes)


def outputs_held_by_schedule(microbatches):
    ranks = dist.get_world_size()
    trained = {name: outputs_held(make_schedule(name, ranks, 1, microbatches)) for name in ("gpipe", "1f1b")}
    with torch.no_grad():
        return trained | {"evaluation": outputs_held(forward_only("1f1b", ranks, 1, microbatches))}


def test_what_was_sent_is_let_go_once_it_has_arrived(world):
    ranks, microbatches = 3, 12
    for rank, held in enumerate(world(outputs_held_by_schedule, ranks, microbatches)):
        assert all(left == 0 for _, left in held.values())
        assert held["1f1b"][0] <= ranks - rank + 1
        assert held["evaluation"][0] <= 4
    assert microbatches > 2 * ranks, "or these bounds prove nothing"


def evaluated(name, microbatches):
    """Largest difference of the losses of an evaluation between two steps, and whether it left gradients."""
    rank, ranks, chunks = dist.get_rank(), dist.get_world_size(), CHUNKS[name]
    stages = make_stages(ranks * chunks)
    runtime, batches = make_runtime(), make_batches(unequal(microbatches, 0))
    with torch.no_grad():
        losses = run(runtime, forward_only(name, ranks, chunks, microbatches), stages, batches)
    assert not any(p.grad is not None for stage in stages for p in stage.parameters())
    assert runtime.peak_in_flight == 0
    expected = on_one_process(make_stages(ranks * chunks), batches)
    is_last = ranks * chunks - 1 in stages_of(name, ranks, chunks, rank)
    assert sorted(losses) == (list(range(microbatches)) if is_last else [])
    step = make_batches(unequal(12, 1))
    run(runtime, make_schedule(name, ranks, chunks, 12), stages, step)
    return max([abs(losses[i] - expected[i]) for i in losses], default=0.0)


def evaluations():
    return {(name, m): evaluated(name, m) for name in CHUNKS for m in (1, 5)}


def test_forward_only_runs_take_any_number_of_micro_batches_and_leave_no_gradient(world):
    for differences in world(evaluations, 3):
        assert {case: error for case, error in differences.items() if not error <= TOLERANCE} == {}


def frozen(which):
    """Gradients where some stages have nothing to train, or do not use what they are given."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages, expected = make_stages(ranks), make_stages(ranks)
    for model in (stages, expected):
        if which == "first":
            model[0].requires_grad_(False)
        elif which == "all":
            nn.ModuleList(model).requires_grad_(False)
        else:
            model[1][0].weight.data.zero_()
            model[1].forward = lambda hidden, own=model[1]: own[2:](own[0].bias.expand(*hidden.shape[:2], -1))
    batches = make_batches(unequal(4, 0))
    run(make_runtime(), make_schedule("1f1b", ranks, 1, 4), stages, batches)
    if which != "all":
        on_one_process(expected, batches)
    return [
        (p.grad is None, None if p.grad is None or w.grad is None else (p.grad - w.grad).abs().max().item())
        for p, w in zip(stages[rank].parameters(), expected[rank].parameters(), strict=True)
    ]


def all_frozen():
    return {which: frozen(which) for which in ("first", "all", "unread")}


def test_stages_without_anything_to_train_or_that_read_nothing_hold_nobody_up(world):
    first, second = world(all_frozen, 2)
    assert all(has_none for has_none, _ in first["first"] + first["all"] + second["all"])
    assert all(error <= TOLERANCE for has_none, error in second["first"])
    # The stage before one that reads nothing is sent a gradient of zeros.
    assert all(not has_none and error is None for has_none, error in first["unread"])


def failures():
    """What a rank raises when its own stage fails, and a run of the same runtime after that."""
    rank, ranks, microbatches = dist.get_rank(), dist.get_world_size(), 4
    stages, runtime = make_stages(ranks), make_runtime()
    batches, schedule = make_batches(unequal(microbatches, 0)), make_schedule("gpipe", ranks, 1, microbatches)
    # By then the first rank has sent three messages that nobody reads.
    fails_at = {0: 3, 1: 1}[rank]

    def around(stage, microbatch, call):
        if microbatch == fails_at:
            raise DataError("a row", "a rule", "a change")
        return call()

    with pytest.raises(DataError) as caught:
        run(runtime, schedule, stages, batches, around)
    for stage in stages:
        stage.zero_grad()
    dist.barrier()
    expected, batches = make_stages(ranks), make_batches(unequal(microbatches, 1), seed=1)
    run(runtime, schedule, stages, batches)
    on_one_process(expected, batches)
    return type(caught.value).__name__, caught.value.found, largest_difference(stages, expected, (rank,))


def test_an_exception_leaves_as_it_is_and_the_next_run_starts_afresh(world):
    for kind, found, error in world(failures, 2):
        assert (kind, found) == ("DataError", "a row")
        assert error <= TOLERANCE


def other_output(runtime, change):
    """What the first rank raises where its stage returns something else for the second micro-batch."""
    rank = dist.get_rank()

    def around(stage, microbatch, call):
        if rank == 1:
            raise ConnectionError  # It would wait for the second one for ever.
        if microbatch == 0:
            return call()
        return {"positions": call()[:, 1:], "size": call()[..., 1:], "format": call().float()}[change]

    with pytest.raises((ModelError, ConnectionError)) as caught:
        run(runtime, make_schedule("gpipe", 2, 1, 2), make_stages(2), make_batches([(2, 3)] * 2), around)
    dist.barrier()
    return str(caught.value)


def other_outputs():
    runtime = make_runtime()
    return {change: other_output(runtime, change) for change in ("positions", "size", "format")}


def test_a_stage_that_returns_something_else_than_before_is_refused(world):
    told, _ = world(other_outputs, 2)
    expected = "where stage 1 expects (2, 3, 7) in torch.float64"
    for change, returned in (
        ("positions", "(2, 2, 7) in torch.float64"),
        ("size", "(2, 3, 6) in torch.float64"),
        ("format", "(2, 3, 7) in torch.float32"),
    ):
        assert f"stage 0 returned {returned}, {expected}" in told[change]
