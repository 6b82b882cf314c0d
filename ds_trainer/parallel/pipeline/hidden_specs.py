"""Dtype and shape of the hidden states between two stages, which the reading stage has to know before it gets any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_trainer.errors import ModelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_TRAILING = 7


@dataclass(frozen=True)
class HiddenSpec:
    """What hidden states between two stages have in common, whatever micro-batch they are of.

    Args:
        dtype: Their dtype.
        trailing: Sizes after samples and positions.
    """

    dtype: torch.dtype
    trailing: tuple[int, ...]


class HiddenSpecs:
    """The spec of the hidden states that each stage reads. The sending rank reports it to the reading rank once.

    Args:
        host_group: The pipeline, over gloo.
    """

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self._host_group = host_group
        self._known: dict[int, HiddenSpec] = {}
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []  # Kept: nobody waits for these messages to leave.

    def check(self, hidden: torch.Tensor, stage: int, shape: tuple[int, int], peer: int | None) -> None:
        """Compares hidden states with what the stage that is to read them expects; the first ones set it.

        Args:
            hidden: The hidden states.
            stage: The stage that is to read them.
            shape: Samples, and positions on this rank.
            peer: The pipeline rank that holds that stage; None: this one.

        Comm: of the first ones, one message of 64 bytes to `peer`, over `host_group`.

        Raises:
            ModelError: They look otherwise.
        """
        own = HiddenSpec(hidden.dtype, tuple(hidden.shape[2:]))
        if stage not in self._known:
            self._known[stage] = own
            if peer is not None:
                self._send(own, peer)
        expected = self._known[stage]
        if own != expected or tuple(hidden.shape[:2]) != shape:
            raise ModelError(
                f"stage {stage - 1} returned {tuple(hidden.shape)} in {hidden.dtype}, where stage {stage} expects "
                f"{(*shape, *expected.trailing)} in {expected.dtype}",
                "hidden states between two stages are (samples, positions, ...), and but for these two sizes the same "
                "for every micro-batch",
                "set parallel.pp to 1 for this model",
            )

    def _send(self, own: HiddenSpec, peer: int) -> None:
        padding = [0] * (_MOST_TRAILING - len(own.trailing))
        message = torch.tensor([_DTYPES.index(own.dtype), *own.trailing, *padding])
        self._sent.append((dist.isend(message, group=self._host_group, group_dst=peer), message))

    def of(self, stage: int, peer: int) -> HiddenSpec:
        """The spec of what a stage of this rank reads; the first time it waits for `peer`, which sends it."""
        if stage not in self._known:
            message = torch.empty(1 + _MOST_TRAILING, dtype=torch.int64)
            dist.recv(message, group=self._host_group, group_src=peer)
            dtype, *trailing = message.tolist()
            self._known[stage] = HiddenSpec(_DTYPES[dtype], tuple(size for size in trailing if size))
        return self._known[stage]
