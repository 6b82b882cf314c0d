"""What every side trains: the same model on the same samples in the same order, for the same number of steps."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SEQUENCE, VOCAB = 128, 8192
RANKS, MICRO, ACCUMULATION = 2, 2, 2
GLOBAL = MICRO * ACCUMULATION * RANKS
WARM_UP, STEPS = 4, 24
"""Steps that are not timed, and steps in all."""
LR, WEIGHT_DECAY, MAX_GRAD_NORM = 2e-4, 0.01, 1.0


def make_model() -> Any:
    """A Llama of 8.4 million parameters with seeded weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=SEQUENCE,
        )
    )


def make_rows(count: int = STEPS * GLOBAL, sequence: int = SEQUENCE) -> list[dict[str, list[int]]]:
    """One epoch of samples from a few ids, so that the loss falls from the start; a quarter of each is unlabelled."""
    generator, masked = random.Random(0), sequence // 4
    samples = [generator.choices(range(64), k=sequence) for _ in range(count)]
    return [
        {"input_ids": ids, "attention_mask": [1] * sequence, "labels": [-100] * masked + ids[masked:]}
        for ids in samples
    ]


def run_config(engine: str, output_dir: str) -> dict[str, Any]:
    """The run as a config of ds_trainer; engine is `ddp`, `fsdp2`, or `deepspeed` for ZeRO stage 2."""
    return {
        "parallel": {"engine": engine},
        "data": {"shuffle": False},
        "precision": {"dtype": "fp32"},
        "batch": {"micro_size": MICRO, "accumulation": ACCUMULATION},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM},
        "run": {"output_dir": output_dir, "device": "cpu"},
        "checkpoint": {"every_steps": 0, "export": False},
        "logging": {"plots": False},
    }


class Clock:
    """Notes when each step ended.

    Args:
        steps: Steps in all.
        warm_up: Steps that are not timed.
        tokens: Tokens of a step, over all ranks.
    """

    def __init__(self, steps: int = STEPS, warm_up: int = WARM_UP, tokens: int = GLOBAL * SEQUENCE) -> None:
        self._steps, self._warm_up, self._tokens = steps, warm_up, tokens
        self._ends: list[float] = []

    def step_ended(self) -> None:
        """To be called at the end of every optimizer step."""
        self._ends.append(time.monotonic())

    def write(self, folder: str, losses: list[Any], **more: Any) -> None:
        """Leaves the times, and what proves that the sides did the same work, in `<folder>/result.json`.

        The command line's last argument is the monotonic clock's reading when this process was started.
        """
        assert len(self._ends) == len(losses) == self._steps
        step_s = statistics.median(b - a for a, b in pairwise(self._ends[self._warm_up - 1 :]))
        result = {
            "first_step_s": self._ends[0] - float(sys.argv[-1]),
            "tokens_per_s": self._tokens / step_s,
            "losses": losses,
            **more,
        }
        Path(folder, "result.json").write_text(json.dumps(result))
