"""Imports point to lower packages only, in no circle, and the pure packages load no heavy library."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.levels import LEVELS, PURE

ROOT = Path(__file__).parents[1]
PACKAGE = "ds_trainer"
HEAVY = {"accelerate", "datasets", "deepspeed", "torch", "transformers"}

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


def package(module: str) -> str:
    return module.split(".")[0]


def level(module: str) -> int:
    return LEVELS[package(module)]


def statements(node: ast.AST, *, at_import: bool):
    """Nodes below `node`, those that only a type checker reads included; with `at_import` without functions' bodies."""
    for child in ast.iter_child_nodes(node):
        if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
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


GRAPH = {module: own(imports(path)) for module, path in MODULES.items() if module not in OUTSIDE}


def test_every_package_and_root_module_has_a_level_and_every_level_a_module():
    assert {package(module) for module in GRAPH} == set(LEVELS) and set(LEVELS) > PURE


def test_a_module_imports_only_its_own_level_and_below():
    too_high = {module: names for module in GRAPH if (names := {n for n in GRAPH[module] if level(n) > level(module)})}
    assert not too_high


@pytest.mark.parametrize("name", [str, package], ids=["modules", "packages"])
def test_no_imports_go_in_a_circle(name):
    graph: dict[str, set[str]] = {}
    for module, imported in GRAPH.items():
        graph.setdefault(name(module), set()).update({name(n) for n in imported} - {name(module)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_are_absolute():
    relative = [
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def pure_modules() -> list[str]:
    return sorted(module for module in GRAPH if package(module) in PURE)


def test_no_pure_module_names_a_heavy_library():
    named = {m: {name.split(".")[0] for name in imports(MODULES[m])} & HEAVY for m in pure_modules()}
    assert not {module: libraries for module, libraries in named.items() if libraries}


def test_importing_the_pure_modules_and_the_command_line_loads_no_heavy_library():
    names = [PACKAGE, *(f"{PACKAGE}.{module}" for module in [*pure_modules(), "cli"])]
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE)
    assert not HEAVY & set(done.stdout.split())


def test_files_and_functions_can_be_read_at_once():
    long = {m: n for m, path in MODULES.items() if (n := len(path.read_text().splitlines())) > 400}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (n := node.end_lineno - node.lineno + 1) > 60:
                long[f"{module}.{node.name}"] = n
    assert not long, "at most 400 lines in a file, 60 in a function"


def test_no_test_imports_another():
    importing = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if names := {name for name in imports(path) if ".test_" in name}:
            importing[str(path.relative_to(ROOT))] = names
    assert not importing, "what tests share goes to tests/helpers"
