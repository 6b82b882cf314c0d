"""What a step takes beyond the weights: cross entropy whole, in chunks, and cut over two ranks; recomputation.

    python benchmarks/memory.py

Every row is a new process with the real Trainer on one rank of the ddp engine, or two that share one copy of the model,
on the GPU where there is one for each, else on one CPU core each. Counted is the peak of a rank's memory above what was
in use before the first step: gradients, activations, logits. On the CPU that is resident memory, on a GPU what PyTorch
has allocated. The losses of all rows of a model must agree.
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
        tp: Ranks that share the model.
    """

    name: str
    shape: dict[str, int]
    sections: dict[str, dict] = field(default_factory=dict)
    tp: int = 1


WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 131072}
"""Nearly all is logits."""
DEEP = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 1024}
"""Nearly all is activations."""
WHOLE = Case("vocabulary 131072, whole logits", WIDE)
CHUNKED = Case(f"vocabulary 131072, chunks of {CHUNK} positions", WIDE, {"loss": {"chunk_tokens": CHUNK}})
CUT = Case("vocabulary 131072, cut over 2 ranks", WIDE, tp=2)
CASES = [
    WHOLE,
    CHUNKED,
    CUT,
    Case("12 layers, all activations kept", DEEP),
    Case("12 layers, selective recomputation", DEEP, {"model": {"gradient_checkpointing": "selective"}}),
    Case("12 layers, full recomputation", DEEP, {"model": {"gradient_checkpointing": True}}),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, help="run this row here and print its result (used by the script itself)")
    parser.add_argument("--folder", help="what that run writes goes here")
    args = parser.parse_args()
    if args.case is not None:
        if (result := run_case(CASES[args.case], args.folder)) is not None:
            print(json.dumps(result))
        return
    results = {case.name: start_case(number) for number, case in enumerate(CASES)}
    columns = ("weights, MB", "peak above the weights, MB", "second step, s")
    out = Table("on a rank", *columns, title=f"{MICRO} x {SEQUENCE} positions")
    for case in CASES:
        result, first = results[case.name], next(results[c.name] for c in CASES if c.shape is case.shape)
        if abs(result["loss"] - first["loss"]) > LOSS_TOLERANCE * first["loss"]:
            raise SystemExit(f"{case.name} does not train the same: losses {result['loss']} and {first['loss']}")
        megabytes = (f"{result[key] / 1e6:,.0f}" for key in ("weight_bytes", "peak_bytes"))
        out.add_row(case.name, *megabytes, f"{result['step_s']:.2f}")
    Console(width=110).print(out)
    print(
        f"chunked_peak_ratio={ratio(results, CHUNKED, 'peak_bytes'):.3f}",
        f"tp2_peak_ratio={ratio(results, CUT, 'peak_bytes'):.3f}",
        f"tp2_weight_ratio={ratio(results, CUT, 'weight_bytes'):.3f}",
    )


def ratio(results: dict[str, dict[str, Any]], case: Case, key: str) -> float:
    """A number of a row, of that with whole logits on one rank."""
    return results[case.name][key] / results[WHOLE.name][key]


def start_case(number: int) -> dict[str, Any]:
    """Runs a row in processes of its own and returns its result."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(CASES[number].tp)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, __file__, "--case", str(number), "--folder", folder]
        done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=TIMEOUT_S)
    return json.loads(done.stdout.splitlines()[-1])


def run_case(case: Case, folder: str) -> dict[str, Any] | None:
    """Trains two steps; returns the first rank's numbers and the last loss, on other ranks None."""
    import psutil
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

    from ds_trainer import Trainer
    from ds_trainer.distributed.memory import peak_memory_bytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "max_position_embeddings": SEQUENCE, "tie_word_embeddings": True}
    generator = random.Random(0)
    rows = [generator.choices(range(case.shape["vocab_size"]), k=SEQUENCE) for _ in range(MICRO * STEPS)]
    device = "cuda" if torch.cuda.device_count() >= case.tp else "cpu"
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(**case.shape, **heads)),
        config=run_config(folder, device, case.tp) | case.sections,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
        data_collator=default_data_collator,
    )
    device = trainer.run.mesh.device
    weight_bytes = sum(parameter.nbytes for parameter in trainer.run.model.parameters())
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    trainer.train_step()
    began = time.monotonic()
    trainer.train_step()
    step_s = time.monotonic() - began
    trainer.close()
    peak_bytes = peak_memory_bytes(device) - before
    result = {"loss": trainer.state.loss, "weight_bytes": weight_bytes, "peak_bytes": peak_bytes, "step_s": step_s}
    return result if trainer.is_world_process_zero else None


def run_config(output_dir: str, device: str, tp: int) -> dict[str, Any]:
    """The run, less what a row changes."""
    return {
        "parallel": {"engine": "ddp", "tp": tp},
        "data": {"shuffle": False},
        "precision": {"dtype": "fp32"},
        "batch": {"global_size": MICRO, "micro_size": MICRO},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "run": {"output_dir": output_dir, "max_steps": STEPS, "device": device},
        "checkpoint": {"every_steps": 0, "export": False},
        "logging": {"plots": False, "progress_bar": False},
    }


if __name__ == "__main__":
    main()
