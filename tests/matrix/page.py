"""Compares many model types one by one, and writes what came of each as a table that the docs include."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from tests.helpers.world import RankFailed, World
from tests.matrix.compare import Outcome, worst

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Matrix:
    """One comparison of all model types.

    Args:
        name: Its name on the command line and in docs/.
        ranks: Ranks that a model type is compared on.
        compare: Runs on every rank with a list of model types; outcomes by type, one for each of `layouts`.
        layouts: What a type is compared under.
        head: The page down to the first row of its table, with `{transformers}` and `{torch}`.
        row: Line of a type's outcomes in the table.
    """

    name: str
    ranks: int
    compare: Callable[[list[str]], dict[str, tuple[Outcome, ...]]]
    layouts: tuple[str, ...]
    head: str
    row: Callable[[str, tuple[Outcome, ...]], str]

    @property
    def path(self) -> Path:
        """The page."""
        return DOCS / f"{self.name}_matrix.md"

    def run(self, types: list[str]) -> dict[str, tuple[Outcome, ...]]:
        """Outcomes by model type.

        A world for each: a type that hangs or crashes takes no other with it, and memory is given back.
        """
        world = World()
        outcomes: dict[str, tuple[Outcome, ...]] = {}
        for name in (bar := tqdm(types, unit="type")):
            bar.set_description(name)
            try:
                outcomes[name] = world(self.compare, self.ranks, [name], timeout_s=120.0)[0][name]
            except RankFailed as error:
                outcomes[name] = (Outcome("failed", str(error).strip().splitlines()[-1]),) * len(self.layouts)
        world.close()
        return outcomes

    def page(self, outcomes: dict[str, tuple[Outcome, ...]]) -> str:
        """The text of the page."""
        head = self.head.format(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])
        return head + "".join(self.row(name, of_type) + "\n" for name, of_type in sorted(outcomes.items()))

    def read(self) -> dict[str, list[str]]:
        """The columns of the page's table behind the first, by model type."""
        lines = self.path.read_text().partition("|---|")[2].splitlines()[1:]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {name: columns for name, *columns in cells}

    def main(self, program: str, all_types: list[str]) -> int:
        """Runs the types that the command line names and prints them, or all, and writes the page.

        Returns:
            1 where a type has failed.
        """
        parser = argparse.ArgumentParser(prog=program)
        parser.add_argument("--types", nargs="*", default=[], metavar="TYPE", help="model types; without, all")
        chosen = parser.parse_args().types
        outcomes = self.run(chosen or all_types)
        for name, of_type in outcomes.items():
            if worst(of_type).verdict != "passed" or chosen:
                print(
                    f"{name}: " + "; ".join(f"{what} {each}" for what, each in zip(self.layouts, of_type, strict=True))
                )
        if not chosen:
            self.path.write_text(self.page(outcomes))
        counts = Counter(worst(of_type).verdict for of_type in outcomes.values())
        summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "refused", "failed"))
        print(f"{self.name} matrix: {summary}")
        return int(counts["failed"] > 0)
