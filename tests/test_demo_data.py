import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "demo" / "prepare_data.py"
SIZES = {"train": 60, "eval": 12}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    return _write(tmp_path_factory.mktemp("first"))


def _write(folder: Path) -> Path:
    sizes = [f"--{name}-size={size}" for name, size in SIZES.items()]
    subprocess.run([sys.executable, SCRIPT, f"--out={folder}", "--max-chars=300", *sizes], check=True)
    return folder


def _records(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_each_split_has_the_size_asked_for_and_repeats_nothing(data_folder):
    for split, size in SIZES.items():
        texts = {json.dumps(record["messages"]) for record in _records(data_folder, split)}
        assert len(texts) == size


def test_no_module_and_no_text_is_in_both_splits(data_folder):
    train, evaluation = (_records(data_folder, split) for split in SIZES)
    for key in ("module", "messages"):
        assert not {str(record[key]) for record in train} & {str(record[key]) for record in evaluation}


def test_answers_are_the_functions_that_were_asked_for_without_their_docstrings(data_folder):
    for record in _records(data_folder, "train"):
        system, user, assistant = record["messages"]
        assert [turn["role"] for turn in (system, user, assistant)] == ["system", "user", "assistant"]
        code = assistant["content"].removeprefix("```python\n").removesuffix("\n```")
        (function,) = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
        request, _, docstring = user["content"].partition("\n")
        assert request == f"Write the Python function `{function.name}({ast.unparse(function.args)})`."
        assert docstring.strip()


def test_no_record_is_longer_than_asked_for(data_folder):
    for record in _records(data_folder, "train"):
        assert sum(len(turn["content"]) for turn in record["messages"]) <= 300


def test_two_runs_write_the_same_bytes(data_folder, tmp_path):
    again = _write(tmp_path)
    for split in SIZES:
        assert (again / f"{split}.jsonl").read_bytes() == (data_folder / f"{split}.jsonl").read_bytes()
