"""What the runs of `gpu.py` train: one table of models and config sections, in full size and as a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from workload import MAX_GRAD_NORM, WEIGHT_DECAY, Clock, make_rows

Size = Literal["full", "small"]

WARM_UP = 3
"""Steps that are not timed."""
LR = 5e-5
DEVICE = {"full": "cuda", "small": "cpu"}
DTYPE = {"full": "bf16", "small": "fp32"}
"""A CPU without bf16 arithmetic emulates it, slowly."""


@dataclass(frozen=True)
class Work:
    """A Llama with tied embeddings, and a step's batch.

    Args:
        hidden: Width of the residual stream; the heads' widths add up to it.
        intermediate: Width of the MLP.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads.
        vocab: Rows of the embedding.
        sequence: Tokens of a sample.
        micro: Samples of a forward pass.
        accumulation: Forward passes of a step.
        steps: Steps in all.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    micro: int
    accumulation: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence * self.micro * self.accumulation

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that the model needs for a token, forward and backward.

        6 per weight of a matrix product (the tied embedding is one, as the head), and 6 x layers x hidden x sequence
        for attention, whose causal half alone is needed (Chowdhery et al. 2022, appendix B, has 12 without a mask).
        Nothing is added for recomputation.
        """
        kv = self.hidden * self.kv_heads // self.heads
        block = 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate
        weights = self.layers * block + self.vocab * self.hidden
        return 6 * weights + 6 * self.layers * self.hidden * self.sequence


WORKS: dict[Size, dict[str, Work]] = {
    "full": {
        "1b": Work(2048, 8192, 16, 32, 8, 32_000, sequence=2048, micro=4, accumulation=2, steps=13),
        "3b": Work(3072, 8192, 28, 24, 8, 32_000, sequence=2048, micro=4, accumulation=2, steps=6),
        "128k": Work(2048, 8192, 2, 32, 8, 131_072, sequence=2048, micro=4, accumulation=1, steps=6),
    },
    "small": {
        "1b": Work(64, 128, 2, 4, 2, 512, sequence=64, micro=2, accumulation=2, steps=6),
        "3b": Work(64, 128, 3, 4, 2, 512, sequence=64, micro=2, accumulation=2, steps=6),
        "128k": Work(64, 128, 1, 4, 2, 16_384, sequence=256, micro=4, accumulation=1, steps=6),
    },
}


@dataclass(frozen=True)
class Run:
    """A run of this package.

    Args:
        work: Name in `WORKS`.
        sections: Of the config, beside those that all runs share.
    """

    work: str
    sections: dict[str, dict[str, Any]]


HOST = {"device": "cpu"}
RUNS = {
    "ddp": Run("1b", {"parallel": {"engine": "ddp"}}),
    "fsdp2": Run("1b", {"parallel": {"engine": "fsdp2"}}),
    "zero1": Run("1b", {"zero": {"stage": 1}}),
    "zero2": Run("1b", {"zero": {"stage": 2}}),
    "fp16": Run("1b", {"zero": {"stage": 2}, "precision": {"dtype": "fp16"}}),
    "fsdp2_offload": Run("1b", {"parallel": {"engine": "fsdp2"}, "fsdp": {"cpu_offload": True}}),
    "zero3_offload": Run(
        "3b",
        {
            "zero": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
            "model": {"gradient_checkpointing": True},
        },
    ),
    "whole_loss": Run("128k", {"parallel": {"engine": "ddp"}}),
    "chunked_loss": Run("128k", {"parallel": {"engine": "ddp"}, "loss": {"chunk_tokens": 512}}),
}


def run_config(run: Run, size: Size, output_dir: str) -> dict[str, Any]:
    """The run as a config of ds_trainer."""
    work = WORKS[size][run.work]
    return {
        "data": {"shuffle": False},
        "precision": {"dtype": DTYPE[size]},
        "batch": {"micro_size": work.micro, "accumulation": work.accumulation},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM},
        "run": {"output_dir": output_dir, "device": DEVICE[size]},
        "checkpoint": {"every_steps": 0, "export": False},
        "logging": {"plots": False, "progress_bar": False},
        **run.sections,
    }


def make_model(work: Work, size: Size) -> Any:
    """A Llama on the host with seeded weights, which are drawn on the device: a host takes half a minute for 3B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(DEVICE[size]):
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=work.hidden,
                intermediate_size=work.intermediate,
                num_hidden_layers=work.layers,
                num_attention_heads=work.heads,
                num_key_value_heads=work.kv_heads,
                vocab_size=work.vocab,
                max_position_embeddings=work.sequence,
                tie_word_embeddings=True,
            )
        )
    model.cpu()
    if size == "full":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def rows_of(work: Work) -> list[dict[str, list[int]]]:
    """One epoch of samples."""
    return make_rows(work.steps * work.micro * work.accumulation, work.sequence)


class MemoryClock(Clock):
    """Notes the host's memory at the end of every step too; to be made before the model.

    Args:
        work: What is trained.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work.steps, WARM_UP, work.tokens)
        self._work = work
        self._before, self._most = psutil.virtual_memory().available, 0

    def step_ended(self) -> None:
        """As in `Clock`."""
        super().step_ended()
        # Of the whole machine: page-locked memory is the driver's, and counts to no process.
        self._most = max(self._most, self._before - psutil.virtual_memory().available)

    def write(self, folder: str, losses: list[Any], **more: Any) -> None:
        """As in `Clock`; besides peak bytes allocated on the GPU, and those by which the host's used memory grew."""
        gpu_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        super().write(
            folder,
            losses,
            flops_per_token=self._work.flops_per_token,
            gpu_bytes=gpu_bytes,
            host_bytes=self._most,
            **more,
        )
