"""Imports point down only, in no circle, and the pure modules load no heavy library."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "ds_trainer"
HEAVY = {"accelerate", "datasets", "deepspeed", "torch", "transformers"}

# Longest prefix wins. A module may import modules of its own level and below.
LEVELS = {
    "errors": 0,
    "layout": 0,
    "log": 0,
    "metrics": 0,
    "plots": 0,
    "config": 0,
    "callbacks.hf_logs": 0,
    "checkpoint.folder": 0,
    "saving.best_metric": 0,
    "mesh.grid": 0,
    "mesh.launch_environment": 0,
    "mesh.slurm": 0,
    "mesh.variables": 0,
    "models.spec": 0,
    "tensor_parallel.plan": 0,
    "tensor_parallel.shares": 0,
    "tensor_parallel.sizes": 0,
    "pipeline.costs": 0,
    "pipeline.drawing": 0,
    "pipeline.messages": 0,
    "pipeline.partition": 0,
    "pipeline.plan": 0,
    "pipeline.schedules": 0,
    "pipeline.timeline": 0,
    "data.sampler": 0,
    "planner": 0,
    "mesh.patience": 0,
    "mesh.stacks": 0,
    "mesh.status": 0,
    "mesh.whereabouts": 0,
    "mesh": 1,
    "tensor_parallel.collectives": 1,
    "pipeline.formats": 1,
    "pipeline.parameters": 1,
    "pipeline.runtime": 1,
    "pipeline.split_backward": 1,
    "pipeline.transport": 1,
    "models": 2,
    "tensor_parallel": 2,
    "pipeline": 2,
    "data": 2,
    "loss": 2,
    "optim": 2,
    "engines": 3,
    "executors": 3,
    "checkpoint": 3,
    "asked_got": 4,
    "assembly": 4,
    "callbacks": 4,
    "evaluation": 4,
    "evaluation_samples": 4,
    "generation": 4,
    "ingredients": 4,
    "model_calls": 4,
    "non_finite": 4,
    "output": 4,
    "saving": 4,
    "state": 4,
    "trainer": 4,
    "cli": 5,
}
# Not of a level: the package's own names, resolved lazily, and `python -m ds_trainer`.
OUTSIDE = {"", "__main__"}


def modules() -> dict[str, Path]:
    """Name of every module below the package's own name -> file; a package goes by its own name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def level(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in LEVELS:
            return LEVELS[prefix]
    raise KeyError(f"{PACKAGE}.{module} has no level: give it one in {Path(__file__).name}")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, *, at_import: bool):
    """Nodes below `node` except what only a type checker reads, and, with `at_import`, except functions' bodies."""
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child) or (at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        yield child
        yield from statements(child, at_import=at_import)


def imports(path: Path, *, at_import: bool = False) -> set[str]:
    """Absolute names that a file imports; `from a import b` gives `a.b` where that is a module of ours, else `a`."""
    names = set()
    for node in statements(ast.parse(path.read_bytes()), at_import=at_import):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                names.add(full if full.removeprefix(f"{PACKAGE}.") in MODULES else module)
    return names


def own(names: set[str]) -> set[str]:
    return {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}


@pytest.mark.parametrize("module", sorted(set(MODULES) - OUTSIDE))
def test_a_module_imports_only_its_own_level_and_below(module):
    too_high = {name for name in own(imports(MODULES[module])) if level(name) > level(module)}
    assert not too_high


def test_no_imports_go_in_a_circle():
    graph = {module: own(imports(path)) for module, path in MODULES.items() if module not in OUTSIDE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_are_absolute(module):
    relative = [
        n for n in ast.walk(ast.parse(MODULES[module].read_bytes())) if isinstance(n, ast.ImportFrom) and n.level
    ]
    assert not relative


def pure_modules() -> list[str]:
    return sorted(module for module in set(MODULES) - OUTSIDE if level(module) == 0)


def test_no_pure_module_names_a_heavy_library():
    named = {m: {name.split(".")[0] for name in imports(MODULES[m])} & HEAVY for m in pure_modules()}
    assert not {module: libraries for module, libraries in named.items() if libraries}


@pytest.mark.parametrize("library", sorted(HEAVY))
def test_importing_the_pure_modules_and_the_command_line_loads_no_heavy_library(library, loaded_by_pure_modules):
    assert library not in loaded_by_pure_modules


@pytest.fixture(scope="module")
def loaded_by_pure_modules() -> set[str]:
    names = [PACKAGE, *(f"{PACKAGE}.{module}" for module in [*pure_modules(), "cli"])]
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE).stdout.split()
    )
