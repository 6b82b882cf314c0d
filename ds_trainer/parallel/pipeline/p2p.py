"""Hidden states and their gradients on their way between the ranks of a pipeline, in one run of a schedule."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_trainer.parallel.pipeline.messages import Receive, Send

_UNANSWERED = 2
"""Most messages in flight to a rank that sends none back: one arrives while the other is read."""


@dataclass(frozen=True)
class _Sending:
    """A message on its way; holds its tensor until it has arrived."""

    work: dist.Work
    tensor: torch.Tensor


@dataclass(frozen=True)
class _Receiving:
    """A message that is waited for, and those that this rank sent to the same peer before."""

    work: dist.Work
    buffer: torch.Tensor
    sent_before: deque[_Sending]


class Transport:
    """Sends and receives without waiting, until a message is needed.

    Between two ranks messages of both directions are in the same order on both. So a message that has
    come implies that the peer has received all that was sent to it before: only then are these tensors released.

    Comm: point to point over `group`, the bytes of the hidden states. Over NCCL a pair of ranks has one stream for both
    directions; waiting makes the device's current stream wait, not the host.

    Args:
        group: The pipeline, over the device's backend.
        tag: Number of the run: messages that an earlier run left in flight, when an exception ended it, are not taken
            for this one's (over gloo; over NCCL such a run ends the process).
        answered: Whether each rank that gets messages sends some back; else few are in flight at a time.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int, answered: bool) -> None:
        self._group, self._tag, self._answered = group, tag, answered
        self._sending: defaultdict[int, deque[_Sending]] = defaultdict(deque)
        self._receiving: dict[tuple[str, int, int], _Receiving] = {}

    def send(self, message: Send, tensor: torch.Tensor) -> None:
        """Starts to send a tensor, and keeps it until it has arrived."""
        sending = self._sending[message.peer]
        if not self._answered and len(sending) == _UNANSWERED:
            sending.popleft().work.wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=message.peer, tag=self._tag)
        assert work is not None
        sending.append(_Sending(work, tensor))

    def receive(self, message: Receive, buffer: torch.Tensor) -> None:
        """Starts to receive into a buffer."""
        work = dist.irecv(buffer, group=self._group, group_src=message.peer, tag=self._tag)
        assert work is not None
        sent_before = self._sending.pop(message.peer, deque())
        self._receiving[message.kind, message.stage, message.microbatch] = _Receiving(work, buffer, sent_before)

    def take(self, kind: str, stage: int, microbatch: int) -> torch.Tensor:
        """A message whose `receive` was started before, as soon as it is there."""
        receiving = self._receiving.pop((kind, stage, microbatch))
        receiving.work.wait()
        for sending in receiving.sent_before:
            sending.work.wait()
        return receiving.buffer

    def end(self) -> None:
        """Waits until all has arrived that this rank has sent."""
        assert not self._receiving, f"nobody took {list(self._receiving)}"
        for sending in self._sending.values():
            while sending:
                sending.popleft().work.wait()
