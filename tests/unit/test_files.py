"""Files that are written aside and renamed, and files whose size is checked."""

from pathlib import Path

import pytest

from ds_trainer.files import partial_path, replace_text, size_fault


def test_a_text_replaces_the_earlier_one_and_leaves_nothing_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("earlier")
    replace_text(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_rename_leaves_the_earlier_file(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError("no space")

    path = tmp_path / "metrics.jsonl"
    path.write_text("earlier")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "new")
    assert path.read_text() == "earlier" and partial_path(path).read_text() == "new"


def test_a_size_that_differs_from_the_manifest_is_named(tmp_path):
    path = tmp_path / "shard"
    assert size_fault(path, 3) == f"{path} is missing"
    path.write_bytes(bytes(3))
    assert size_fault(path, 3) is None
    assert size_fault(path, 4000) == f"{path} has 3 bytes instead of 4,000"
