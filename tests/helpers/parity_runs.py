"""The parity runner of all parity tests: one layout on this rank, held to one process's run step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ds_trainer.callbacks.base import Callback
from tests.helpers.parity import Recorder, cell_config, collate, compare_weights, rows


class Witness(Protocol):
    """Looks at live objects while a layout runs."""

    def __init__(self, trainer: Any) -> None: ...

    def watch(self) -> AbstractContextManager:
        """Entered for the time of the training."""

    def proof(self) -> dict:
        """What shows that the layout's mechanism acted; called after the training."""


def run_cell(
    reference: Path,
    out: Path,
    data: int,
    optimizer: str,
    sections: dict,
    witness: type[Witness],
    fault: Callable[[Any], None] | None = None,
    *,
    lr: float | None = None,
    recorder: Callable[[Path], Recorder] = Recorder,
    callbacks: Sequence[Callback] = (),
    weight_tolerance: float | None = None,
) -> dict:
    """Trains one layout; gradients, losses, norms and weights are compared with the reference's as they come.

    Args:
        reference: What `write_reference` or `write_bf16_reference` wrote.
        out: Output folder of the run.
        data: Number of data-parallel ranks.
        optimizer: A key of `parity.OPTIMIZERS`.
        sections: Sections of the config that make the layout.
        witness: Made before the first step, with the trainer.
        fault: Breaks something in the trainer before the first step.
        lr: Instead of the optimizer's own.
        recorder: Makes the callback that compares each step.
        callbacks: More of them.
        weight_tolerance: Of the final weights, instead of the optimizer's own.

    Returns:
        The witness's proof.
    """
    from ds_trainer.trainer.trainer import Trainer

    vocab = json.loads((reference / "checkpoint" / "config.json").read_text())["vocab_size"]
    trainer = Trainer(
        config=cell_config(reference, out, data, optimizer, lr, **sections),
        train_dataset=rows(vocab),
        data_collator=collate,
        callbacks=[recorder(reference), *callbacks],
    )
    watching = witness(trainer)
    if fault is not None:
        fault(trainer)
    with watching.watch():
        trainer.train()
    proof = watching.proof()
    compare_weights(trainer, reference, optimizer, weight_tolerance)
    trainer.close()
    return proof
