"""Records come with their origin, and broken files say where."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ds_trainer.data.readers import open_source
from ds_trainer.errors import DataError

RECORDS = [{"text": "a"}, {"text": "b\nc"}, {"text": "d"}]


def read(source):
    return list(open_source(source, "train").records())


def test_jsonl_gives_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in RECORDS[:2]) + "\n" + json.dumps(RECORDS[2]))
    assert read(str(file)) == [(RECORDS[0], f"{file}:1"), (RECORDS[1], f"{file}:2"), (RECORDS[2], f"{file}:4")]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_gives_the_line_each_record_begins_at(tmp_path, indent):
    file = tmp_path / "a.json"
    file.write_text("\n" + json.dumps(RECORDS, indent=indent))
    lines = [2, 2, 2] if indent is None else [3, 6, 9]
    assert read(file) == [(record, f"{file}:{line}") for record, line in zip(RECORDS, lines, strict=True)]


def test_json_lines_under_the_name_of_json_are_read_as_lines(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    assert [record for record, _ in read(file)] == RECORDS


def test_parquet_gives_rows(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS), file, row_group_size=2)
    source = open_source(file, "train")
    assert source.total == 3
    assert list(source.records()) == [(record, f"{file}: row {i}") for i, record in enumerate(RECORDS)]


def test_several_files_are_read_one_after_the_other(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    files[0].write_text(json.dumps(RECORDS[0]))
    pq.write_table(pa.Table.from_pylist(RECORDS[1:]), files[1])
    assert [record for record, _ in read(tuple(map(str, files)))] == RECORDS


@pytest.mark.parametrize("dataset", [RECORDS, datasets.Dataset.from_list(RECORDS)], ids=["list", "datasets"])
def test_map_style_data_sets_are_read_by_index(dataset):
    assert [dict(record) for record, _ in read(dataset)] == RECORDS
    assert open_source(dataset, "train").total == 3


def test_the_fingerprint_follows_the_content(tmp_path):
    file = tmp_path / "a.jsonl"
    prints = []
    for text in ('{"text": "a"}', '{"text": "b"}', '{"text": "a"}'):
        file.write_text(text)
        prints.append(open_source(file, "train").fingerprint)
    assert prints[0] == prints[2] != prints[1]
    assert open_source(RECORDS, "train").fingerprint != open_source(RECORDS[:2], "train").fingerprint


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ":2: "),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ":2: "),
        ("a.json", b'[{"text": "a"},\n {"text": "b",\n  "c"}]', ":3: "),
        ("a.json", b'[{"text": "a"},\n', ": the list is not closed"),
        ("a.json", b'[{"text": "\xff"}]', "utf-8"),
        ("a.parquet", b"no parquet", "a.parquet: "),
    ],
)
def test_a_broken_file_says_which_line(tmp_path, name, content, where):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert where in caught.value.found
    assert str(tmp_path / name) in caught.value.found


def test_a_missing_file_and_an_unknown_kind_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"data\.eval: no file .*none\.jsonl"):
        open_source(str(tmp_path / "none.jsonl"), "eval")
    (tmp_path / "a.csv").write_text("text")
    with pytest.raises(DataError, match=r"'\.csv'"):
        open_source(str(tmp_path / "a.csv"), "train")


def test_what_is_no_map_style_data_set_is_refused():
    with pytest.raises(DataError, match=r"DatasetDict with the keys \['train'\]"):
        open_source(datasets.DatasetDict(train=datasets.Dataset.from_list(RECORDS)), "train")
    with pytest.raises(DataError, match="map-style"):
        open_source((record for record in RECORDS), "train")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_brackets_in_thousands_are_a_data_error_with_their_line(tmp_path, name):
    path = tmp_path / name
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match=f"{name}:1"):
        list(open_source(str(path), "train").records())
