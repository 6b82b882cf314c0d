"""Which hidden states and gradients each rank of a pipeline sends and receives, and when. Pure.

Messages between two ranks go in the order in which both issue them: NCCL runs them one after the other on the pair's
communicator, whichever way they go, so that two ranks with different orders would wait for each other forever. Here all
ranks take the same order, that of the times at which messages are ready to be sent if all passes take equal times. In
each rank's list a message is placed by that time among the ends of the rank's own passes: after the pass whose result
it is, and before the pass that needs it. Its receiver already waits for it when it is sent.

So every list is taken from one sequence of events, in which a message's two ends are one event. That is why no step
can hang, even if every send waited for its receiver and every receive for its sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Literal

from ds_trainer.planning.pp_schedules import Action, Kind, Schedule
from ds_trainer.planning.pp_timeline import simulate

MessageKind = Literal["hidden", "gradient"]


@dataclass(frozen=True, slots=True)
class Message:
    """Hidden states or their gradient of one micro-batch on their way to another rank.

    Args:
        kind: Hidden states go to the next stage, the gradient of its input from a stage to the one before.
        stage: The stage that reads it.
        microbatch: Of which micro-batch it is.
        peer: The pipeline rank at the other end.
    """

    kind: MessageKind
    stage: int
    microbatch: int
    peer: int


class Send(Message):
    """Starts to send a message; comes after the pass that computed it."""

    __slots__ = ()


class Receive(Message):
    """Starts to receive a message; comes before the pass that reads it, which waits until it is there."""

    __slots__ = ()


Operation = Action | Send | Receive


@lru_cache(maxsize=16)
def with_messages(schedule: Schedule) -> tuple[tuple[Operation, ...], ...]:
    """The passes of each rank, with what it sends and receives between them; cached."""
    ended = [(span.end, rank, span.action) for rank, row in enumerate(simulate(schedule).spans) for span in row]
    lists: list[list[Operation]] = [[] for _ in schedule.actions]
    # A rank ends one pass at a time, so that time and rank put passes, and the messages they make, into one order.
    for _, at_once in groupby(sorted(ended), key=itemgetter(0)):
        passes = [(rank, action) for _, rank, action in at_once]
        for rank, action in passes:
            lists[rank].append(action)
        for rank, action in passes:
            stage = schedule.target_of(action)
            if stage is not None and (peer := schedule.rank_of(stage)) != rank:
                kind: MessageKind = "hidden" if action.kind is Kind.FORWARD else "gradient"
                lists[rank].append(Send(kind, stage, action.microbatch, peer))
                lists[peer].append(Receive(kind, stage, action.microbatch, rank))
    return tuple(map(tuple, lists))
