"""What hidden states between two stages look like, which the stage that reads them has to know before it gets any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_trainer.errors import ModelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_TRAILING = 7


@dataclass(frozen=True)
class Format:
    """What hidden states between two stages have in common, whatever micro-batch they are of.

    Args:
        dtype: Number format.
        trailing: Sizes after samples and positions.
    """

    dtype: torch.dtype
    trailing: tuple[int, ...]


class Formats:
    """The format of the hidden states that each stage reads. A rank is told it once, by the rank that sends them.

    Args:
        host_group: The pipeline, over gloo.
    """

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self._host_group = host_group
        self._known: dict[int, Format] = {}
        self._told: list[tuple[dist.Work | None, torch.Tensor]] = []  # Kept: nobody waits for these messages to leave.

    def check(self, hidden: torch.Tensor, stage: int, shape: tuple[int, int], peer: int | None) -> None:
        """Holds hidden states against what the stage that is to read them expects; the first ones set it.

        Args:
            hidden: The hidden states.
            stage: The stage that is to read them.
            shape: Samples, and positions on this rank.
            peer: The pipeline rank that holds that stage; None: this one.

        Comm: of the first ones, one message of 64 bytes to `peer`, over `host_group`.

        Raises:
            ModelError: They look otherwise.
        """
        own = Format(hidden.dtype, tuple(hidden.shape[2:]))
        if stage not in self._known:
            self._known[stage] = own
            if peer is not None:
                self._tell(own, peer)
        expected = self._known[stage]
        if own != expected or tuple(hidden.shape[:2]) != shape:
            raise ModelError(
                f"stage {stage - 1} returned {tuple(hidden.shape)} in {hidden.dtype}, where stage {stage} expects "
                f"{(*shape, *expected.trailing)} in {expected.dtype}",
                "hidden states between two stages are (samples, positions, ...), and but for these two sizes the same "
                "for every micro-batch",
                "set parallel.pp to 1 for this model",
            )

    def _tell(self, own: Format, peer: int) -> None:
        padding = [0] * (_MOST_TRAILING - len(own.trailing))
        told = torch.tensor([_DTYPES.index(own.dtype), *own.trailing, *padding])
        self._told.append((dist.isend(told, group=self._host_group, group_dst=peer), told))

    def of(self, stage: int, peer: int) -> Format:
        """The format of what a stage of this rank reads; the first time it waits for `peer`, which sends it."""
        if stage not in self._known:
            told = torch.empty(1 + _MOST_TRAILING, dtype=torch.int64)
            dist.recv(told, group=self._host_group, group_src=peer)
            dtype, *trailing = told.tolist()
            self._known[stage] = Format(_DTYPES[dtype], tuple(size for size in trailing if size))
        return self._known[stage]
