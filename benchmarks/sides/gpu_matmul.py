"""How fast this device multiplies matrices: `gpu_matmul.py SIZE FOLDER STARTED`."""

import json
import sys
from pathlib import Path

import torch
from gpu_workload import DEVICE, DTYPE
from torch.utils.benchmark import Timer

EDGE = {"full": 8192, "small": 512}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    """Times square products of random numbers (zeros would run faster), and leaves the rate."""
    size, folder, _ = sys.argv[1:]
    edge = EDGE[size]
    a, b = (torch.randn(edge, edge, dtype=TORCH_DTYPES[DTYPE[size]], device=DEVICE[size]) for _ in range(2))
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    seconds = timer.blocked_autorange(min_run_time=1.0).median
    Path(folder, "result.json").write_text(json.dumps({"flops_per_s": 2 * edge**3 / seconds}))


if __name__ == "__main__":
    main()
