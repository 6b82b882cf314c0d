"""Makes instruction data from Python's standard library: a docstring is the request, the code below it the answer.

The data is on every machine that can run this and needs no download. It is split by module: none gives records to both
the training and the evaluation file, so a function's siblings cannot leak from one into the other.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SYSTEM = "You write Python."
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
EVAL_SHARE = 0.2
MIN_BODY_LINES = 2

Function = ast.FunctionDef | ast.AsyncFunctionDef


def library_modules(root: Path) -> list[tuple[str, Path]]:
    """Name and file of every module of the standard library at `root`, in order, tests and programs left out."""
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [(".".join(f.with_suffix("").parts), root / f) for f in files if SKIPPED_FOLDERS.isdisjoint(f.parts)]


def split_of(module: str) -> str:
    """Split that a module's functions belong to: a fixed property of its name."""
    draw = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4]) / 2**32
    return "eval" if draw < EVAL_SHARE else "train"


def to_messages(function: Function) -> list[dict[str, str]] | None:
    """One chat: signature and docstring as the request, the code without the docstring as the answer.

    Returns:
        The chat; None for a function without a docstring or with too little besides.
    """
    docstring = ast.get_docstring(function)
    if docstring is None:
        return None
    code = ast.unparse(_without_docstring(function))
    if len(code.splitlines()) < MIN_BODY_LINES + 1 + len(function.decorator_list):
        return None
    request = f"Write the Python function `{function.name}({ast.unparse(function.args)})`.\n{docstring}"
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": request},
        {"role": "assistant", "content": f"```python\n{code}\n```"},
    ]


def _without_docstring(function: Function) -> Function:
    fields = dict(ast.iter_fields(function)) | {"body": function.body[1:]}
    return ast.copy_location(type(function)(**fields), function)


def chats(root: Path, max_chars: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Module and chat of every usable function of the standard library, each text once.

    Args:
        root: Folder of the standard library.
        max_chars: Longest chat, counted over the text of its messages.
    """
    seen = set()
    for module, path in library_modules(root):
        for node in ast.walk(ast.parse(path.read_bytes())):
            messages = to_messages(node) if isinstance(node, Function) else None
            text = "".join(message["content"] for message in messages or [])
            # Small functions recur across modules; one that recurs in the other split would be a leak.
            if messages and len(text) <= max_chars and text not in seen:
                seen.add(text)
                yield module, messages


def build(root: Path, max_chars: int, sizes: dict[str, int], seed: int = 0) -> dict[str, list[dict]]:
    """Draws the records of each split.

    Args:
        root: Folder of the standard library.
        max_chars: Longest chat, counted over the text of its messages.
        sizes: Split name (`train`, `eval`) -> number of records.
        seed: Seed of the draw.

    Returns:
        Split name -> records with the keys `messages` and `module`.
    """
    pools: dict[str, list[dict]] = {name: [] for name in sizes}
    for module, messages in chats(root, max_chars):
        pools[split_of(module)].append({"messages": messages, "module": module})
    return {name: random.Random(seed).sample(pool, sizes[name]) for name, pool in pools.items()}


def main() -> None:
    """Writes `train.jsonl` and `eval.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".demo/data"))
    parser.add_argument("--train-size", type=int, default=480, help="training records")
    parser.add_argument("--eval-size", type=int, default=24, help="evaluation records")
    parser.add_argument("--max-chars", type=int, default=360, help="longest record, in characters of its messages")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = {"train": args.train_size, "eval": args.eval_size}
    for name, records in build(Path(sysconfig.get_path("stdlib")), args.max_chars, sizes).items():
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        modules = len({record["module"] for record in records})
        print(f"data: wrote {len(records)} records from {modules} modules to {path}")


if __name__ == "__main__":
    main()
