"""What ranks report to one another beside the collectives: keys in the process group's own store."""

from __future__ import annotations

import torch.distributed as dist

from ds_trainer.health.status import Status


class StatusStore:
    """One rank's view of all ranks' statuses and failures.

    Failures are numbered, since a program may catch an exception that all ranks raise, and go on.

    Args:
        store: The process group's store; opens a connection of its own where the store can.
        rank: This rank.
        world: Number of ranks.

    Raises:
        RuntimeError: Each method, when the process that serves the store has ended.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store = dist.PrefixStore("ds_trainer.monitor", store.clone())  # type: ignore[attr-defined]
        self._rank, self._world = rank, world
        self.number = 0
        """Number of the next failure."""

    def publish(self, status: Status) -> None:
        """Replaces this rank's status."""
        self._store.set(f"status/{self._rank}", status.to_json())

    def status(self, rank: int) -> Status | None:
        """A rank's latest status; None before its first."""
        key = f"status/{rank}"
        return Status.from_json(self._store.get(key).decode()) if self._store.check([key]) else None

    def statuses(self) -> dict[int, Status]:
        """The latest status of every rank; empty until each has published its first."""
        keys = [f"status/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):
            return {}
        return {rank: Status.from_json(self._store.get(key).decode()) for rank, key in enumerate(keys)}

    def mark_exited(self) -> None:
        """Announces that this rank ends in good order."""
        self._store.set(f"exited/{self._rank}", "1")

    def has_exited(self, rank: int) -> bool:
        """Whether a rank has ended in good order."""
        return self._store.check([f"exited/{rank}"])

    def claim_failure(self) -> int:
        """Claims the right to report the next failure.

        Returns:
            The rank whose claim came first: it alone reports the failure.
        """
        return int(self._store.compare_set(f"failure/{self.number}", "", str(self._rank)))

    def failure(self) -> int | None:
        """The rank that has claimed the next failure; None: no rank has."""
        key = f"failure/{self.number}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def acknowledge(self, number: int) -> None:
        """Announces that this rank knows of a failure and will not report it."""
        self._store.set(f"known/{number}/{self._rank}", "1")

    def has_acknowledged(self, number: int, rank: int) -> bool:
        """Whether a rank has acknowledged a failure."""
        return self._store.check([f"known/{number}/{rank}"])

    def advance_past(self, number: int) -> None:
        """Marks failure `number` as over for this rank."""
        self.number = max(self.number, number + 1)
