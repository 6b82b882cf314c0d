"""What a step takes beyond the weights: cross entropy whole and in chunks, and recomputation of activations.

    python benchmarks/memory.py

Every row is a new process with the real Trainer on one rank of the ddp engine, on the GPU where there is one, else on
one CPU core. Counted is the peak of memory above what was in use before the first step: gradients, activations, logits.
On the CPU that is resident memory, on a GPU what PyTorch has allocated. The losses of all rows of a model must agree.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

SEQUENCE, MICRO, STEPS, CHUNK = 512, 2, 2, 128
LOSS_TOLERANCE = 1e-5
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        name: As printed.
        shape: Of the Llama.
        sections: Sections of the run's config.
    """

    name: str
    shape: dict[str, int]
    sections: dict[str, dict] = field(default_factory=dict)


WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 131072}
"""Nearly all is logits."""
DEEP = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 1024}
"""Nearly all is activations."""
WHOLE = Case("vocabulary 131072, whole logits", WIDE)
CHUNKED = Case(f"vocabulary 131072, chunks of {CHUNK} positions", WIDE, {"loss": {"chunk_tokens": CHUNK}})
CASES = [
    WHOLE,
    CHUNKED,
    Case("12 layers, all activations kept", DEEP),
    Case("12 layers, selective recomputation", DEEP, {"model": {"gradient_checkpointing": "selective"}}),
    Case("12 layers, full recomputation", DEEP, {"model": {"gradient_checkpointing": True}}),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, help="run this row here and print its result (used by the script itself)")
    number = parser.parse_args().case
    if number is not None:
        print(json.dumps(run_case(CASES[number])))
        return
    results = {case.name: start_case(number) for number, case in enumerate(CASES)}
    out = Table("", "peak above the weights, MB", "second step, s", title=f"{MICRO} x {SEQUENCE} positions")
    for case in CASES:
        result, first = results[case.name], next(results[c.name] for c in CASES if c.shape is case.shape)
        if abs(result["loss"] - first["loss"]) > LOSS_TOLERANCE * first["loss"]:
            raise SystemExit(f"{case.name} does not train the same: losses {result['loss']} and {first['loss']}")
        out.add_row(case.name, f"{result['bytes'] / 1e6:,.0f}", f"{result['step_s']:.2f}")
    Console(width=100).print(out)
    print(f"chunked_peak_ratio={results[CHUNKED.name]['bytes'] / results[WHOLE.name]['bytes']:.3f}")


def start_case(number: int) -> dict[str, Any]:
    """Runs a row in a process of its own and returns its result."""
    command = [sys.executable, __file__, "--case", str(number)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=TIMEOUT_S)
    return json.loads(done.stdout.splitlines()[-1])


def run_case(case: Case) -> dict[str, Any]:
    """Trains two steps; returns the last loss, the peak above what was there before them, and the second one's time."""
    import psutil
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

    from ds_trainer import Trainer
    from ds_trainer.mesh.memory import peak_memory_bytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "max_position_embeddings": SEQUENCE, "tie_word_embeddings": True}
    generator = random.Random(0)
    rows = [generator.choices(range(case.shape["vocab_size"]), k=SEQUENCE) for _ in range(MICRO * STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=LlamaForCausalLM(LlamaConfig(**case.shape, **heads)),
            config=run_config(folder) | case.sections,
            train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
            data_collator=default_data_collator,
        )
        device = trainer.run.mesh.device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
        trainer.train_step()
        began = time.monotonic()
        trainer.train_step()
        step_s = time.monotonic() - began
        trainer.close()
    return {"loss": trainer.state.loss, "bytes": peak_memory_bytes(device) - before, "step_s": step_s}


def run_config(output_dir: str) -> dict[str, Any]:
    """The run, less what a row changes."""
    return {
        "parallel": {"engine": "ddp"},
        "data": {"shuffle": False},
        "precision": {"dtype": "fp32"},
        "batch": {"global_size": MICRO, "micro_size": MICRO},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "run": {"output_dir": output_dir, "max_steps": STEPS},
        "checkpoint": {"every_steps": 0, "export": False},
        "logging": {"plots": False, "progress_bar": False},
    }


if __name__ == "__main__":
    main()
