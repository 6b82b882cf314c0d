"""Runs a rank's passes of a schedule and the messages between them, one after the other as they are listed.

Legend: B samples, t positions on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds_trainer.parallel.deferred_weight_grads import DeferredGradients, defer_weight_gradients
from ds_trainer.parallel.pipeline.hidden_specs import HiddenSpecs
from ds_trainer.parallel.pipeline.messages import Operation, Receive, Send, with_messages
from ds_trainer.parallel.pipeline.p2p import Transport
from ds_trainer.planning.pp_schedules import Action, Kind, Schedule

Forward = Callable[[int, int, torch.Tensor | None], torch.Tensor]


class PipelineRuntime:
    """Runs schedules on this rank's stages.

    Args:
        group: The pipeline's ranks in its order, over the device's backend.
        host_group: The same, over gloo.
        device: What this rank computes on.

    Attributes:
        peak_in_flight: Most activations held at once in the last run, in micro-batches times stages.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> None:
        self.peak_in_flight = 0
        self._group, self._device = group, device
        self._specs = HiddenSpecs(host_group)
        self._num_runs = 0

    def run(self, schedule: Schedule, forward: Forward, shapes: Sequence[tuple[int, int]]) -> None:
        """Takes micro-batches through the pipeline: forward, and backward where the schedule has such passes.

        Backward passes add up gradients in the parameters' `grad`, as those of a single process do.

        Args:
            schedule: The passes of every rank; the same on all.
            forward: (stage, micro-batch, hidden states, on the first stage None) -> hidden states (B, t, ...) for the
                next stage, or on the last one the loss, from which the backward pass starts.
            shapes: Of each micro-batch the samples B, and the positions t of its hidden states on this rank.

        Comm: point to point over `group`; of each micro-batch, between each two stages on different ranks that follow
            one another, its hidden states and their gradient.

        Raises:
            ModelError: A stage returned what the next one does not expect.
        """
        self._num_runs += 1
        run = _Run(schedule, forward, shapes, self._group, self._specs, self._device, self._num_runs)
        for operation in with_messages(schedule)[self._group.rank()]:
            run.do(operation)
        run.end()
        self.peak_in_flight = run.peak_in_flight


@dataclass(frozen=True)
class _Forwarded:
    """What the backward pass of a micro-batch through a stage needs. Not what the stage returned: its memory is free.

    Args:
        hidden: The hidden states that went in; None on the first stage.
        output: Where the graph begins; None where nothing is to be differentiated.
    """

    hidden: torch.Tensor | None
    output: GradientEdge | None


class _Run:
    """The state of one run; discarded with it, also after an exception."""

    def __init__(
        self,
        schedule: Schedule,
        forward: Forward,
        shapes: Sequence[tuple[int, int]],
        group: dist.ProcessGroup,
        specs: HiddenSpecs,
        device: torch.device,
        number: int,
    ) -> None:
        self.peak_in_flight = 0
        self._schedule, self._stage_forward, self._shapes = schedule, forward, shapes
        self._rank, self._specs, self._device = group.rank(), specs, device
        self._is_training = any(action.kind is not Kind.FORWARD for row in schedule.actions for action in row)
        self._transport = Transport(group, number, answered=self._is_training)
        self._results: dict[tuple[str, int, int], torch.Tensor] = {}
        """Results of this rank's passes for others: kind, stage that reads it, micro-batch -> tensor."""
        self._forwarded: dict[tuple[int, int], _Forwarded] = {}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}

    def do(self, operation: Operation) -> None:
        """One pass, or the beginning of one message."""
        if isinstance(operation, Send):
            made = self._results.pop((operation.kind, operation.stage, operation.microbatch))
            self._transport.send(operation, made)
        elif isinstance(operation, Receive):
            self._transport.receive(operation, self._buffer(operation))
        else:
            self._pass(operation)

    def end(self) -> None:
        """Returns when all messages have arrived."""
        self._transport.end()

    def _buffer(self, message: Receive) -> torch.Tensor:
        """Memory for a message. A gradient has the spec of its hidden states, which the next stage reads."""
        reader = message.stage if message.kind == "hidden" else message.stage + 1
        known = self._specs.of(reader, message.peer)
        shape = (*self._shapes[message.microbatch], *known.trailing)
        return torch.empty(shape, dtype=known.dtype, device=self._device)

    def _pass(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(stage, microbatch)
            case Kind.BACKWARD:
                self._backward(stage, microbatch)
            case Kind.INPUT:
                with defer_weight_gradients() as deferred:
                    self._backward(stage, microbatch)
                self._deferred[stage, microbatch] = deferred
            case Kind.WEIGHT:
                self._deferred.pop((stage, microbatch)).accumulate()

    def _forward(self, stage: int, microbatch: int) -> None:
        hidden = None
        if stage > 0:
            hidden = self._take("hidden", stage, microbatch).requires_grad_(self._is_training)
        output = self._stage_forward(stage, microbatch, hidden)
        following = stage + 1
        if following < self._schedule.num_stages:
            peer = self._schedule.rank_of(following)
            self._specs.check(output, following, self._shapes[microbatch], None if peer == self._rank else peer)
            self._results["hidden", following, microbatch] = output.detach()
        elif self._is_training:
            self._results["gradient", stage, microbatch] = torch.ones_like(output)
        if self._is_training:
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._forwarded[stage, microbatch] = _Forwarded(hidden, edge)
            self.peak_in_flight = max(self.peak_in_flight, len(self._forwarded) + len(self._deferred))

    def _backward(self, stage: int, microbatch: int) -> None:
        forwarded = self._forwarded.pop((stage, microbatch))
        gradient = self._take("gradient", stage, microbatch)
        if forwarded.output is not None:
            torch.autograd.backward(forwarded.output, gradient)
        if (hidden := forwarded.hidden) is not None:
            # The stage before waits for one, also where this one's output does not depend on what went in.
            of_hidden = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self._results["gradient", stage - 1, microbatch] = of_hidden

    def _take(self, kind: str, stage: int, microbatch: int) -> torch.Tensor:
        """What a pass needs, from this rank or from another."""
        made = self._results.pop((kind, stage, microbatch), None)
        return self._transport.take(kind, stage, microbatch) if made is None else made
