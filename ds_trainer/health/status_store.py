"""Where ranks leave word for one another beside the collectives: keys in the process group's own store."""

from __future__ import annotations

import torch.distributed as dist

from ds_trainer.health.status import Status


class Board:
    """One rank's view of the words that all ranks have left.

    Failures are numbered, since a program may catch one that all ranks raise, and go on.

    Args:
        store: The process group's store; a connection of its own is opened where the store knows how.
        rank: This rank.
        world: Number of ranks.

    Raises:
        RuntimeError: Each method, when whoever holds the store has ended.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store = dist.PrefixStore("ds_trainer.monitor", store.clone())  # type: ignore[attr-defined]
        self._rank, self._world = rank, world
        self.number = 0
        """Of the failure that comes next."""

    def publish(self, status: Status) -> None:
        """Replaces this rank's status."""
        self._store.set(f"status/{self._rank}", status.to_json())

    def status(self, rank: int) -> Status | None:
        """A rank's latest status; None before its first."""
        key = f"status/{rank}"
        return Status.from_json(self._store.get(key).decode()) if self._store.check([key]) else None

    def statuses(self) -> dict[int, Status]:
        """Every rank's latest status; empty as long as one has not left its first."""
        keys = [f"status/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):
            return {}
        return {rank: Status.from_json(self._store.get(key).decode()) for rank, key in enumerate(keys)}

    def leave(self) -> None:
        """Says that this rank ends in good order."""
        self._store.set(f"left/{self._rank}", "1")

    def has_left(self, rank: int) -> bool:
        """Whether a rank has ended in good order."""
        return self._store.check([f"left/{rank}"])

    def report_failure(self) -> int:
        """Announces a failure that this rank will tell about.

        Returns:
            The rank whose announcement came first: it alone speaks.
        """
        return int(self._store.compare_set(f"failure/{self.number}", "", str(self._rank)))

    def failure(self) -> int | None:
        """The rank that has announced a failure, if one has."""
        key = f"failure/{self.number}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def acknowledge(self, number: int) -> None:
        """Says that this rank knows of a failure and will stay silent."""
        self._store.set(f"known/{number}/{self._rank}", "1")

    def has_acknowledged(self, number: int, rank: int) -> bool:
        """Whether a rank has said so."""
        return self._store.check([f"known/{number}/{rank}"])

    def past(self, number: int) -> None:
        """Failure `number` is over for this rank."""
        self.number = max(self.number, number + 1)
