"""The configs of ds_configs, and each resolved on the ranks that its README states."""

from pathlib import Path

from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine

FOLDER = Path(__file__).parents[2] / "ds_configs"
SHIPPED = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.json"))
PARALLEL = {name: load_config(FOLDER / name)[0].parallel for name in SHIPPED}
WHOLE_MODELS = [name for name, parallel in PARALLEL.items() if parallel.tp * parallel.pp == 1]
"""Those that other trainers have words for."""
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (FOLDER / "README.md").read_text().splitlines()
    if line.startswith("| [")
]
MACHINES = {
    "smoke": lambda ranks: Machine(ranks, "cpu", ("fp32",), "a CPU without bf16"),
    "recipes": lambda ranks: Machine(ranks, "cuda", ("fp32", "bf16", "fp16"), "a GPU"),
}


def resolved(name):
    """The resolved run."""
    ranks = int(next(row[1] for row in TABLE if row[0].startswith(f"[{name}]")))
    return resolve(*load_config(FOLDER / name), MACHINES[Path(name).parent.name](ranks))
