"""Reads records one at a time from json, jsonl and parquet files or a map-style data set, each with its origin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow import ArrowInvalid

from ds_trainer.config.data_files import SUFFIXES, file_fault
from ds_trainer.data.worker_error import error_note
from ds_trainer.errors import DataError

Record = Mapping[str, Any]
Origin = str
"""`file:line`, `file: row n` or `sample n`, for error texts."""


@dataclass(frozen=True)
class Source:
    """A stream of records that can be opened again.

    Args:
        fingerprint: Changes whenever the content does.
        total: Number of records; None: not known before they are read.
        records: Opens the stream: pairs of record and origin.
    """

    fingerprint: str
    total: int | None
    records: Callable[[], Iterator[tuple[Record, Origin]]]


def kind_of(value: Any) -> str:
    """Type of a value with its article, for error texts: `an int`, `a str`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def open_source(source: Any, what: str) -> Source:
    """Opens files or a map-style data set.

    Args:
        source: A path, several paths, or an object with `len()` and `[i]`.
        what: `train` or `eval`, for error texts.

    Raises:
        DataError: A file is missing, unreadable or of an unknown kind; the object is not a map-style data set.
    """
    if isinstance(source, str | Path):
        source = (source,)
    if isinstance(source, tuple | list) and source and all(isinstance(path, str | Path) for path in source):
        files = [_open_file(Path(path), what) for path in source]
        totals = [file.total for file in files]
        return Source(
            fingerprint=_digest(file.fingerprint for file in files),
            total=None if None in totals else sum(total for total in totals if total is not None),
            records=lambda: (pair for file in files for pair in file.records()),
        )
    return _open_dataset(source, what)


def _open_file(path: Path, what: str) -> Source:
    if fault := file_fault(f"data.{what}", path):
        raise DataError(*fault)
    try:
        with path.open("rb") as file:
            fingerprint = hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise DataError(
            f"data.{what}: {path}: {error.strerror}", "every data file must be readable", f"correct data.{what}"
        ) from error
    kind = path.suffix.lower()
    total = _open_parquet(path).metadata.num_rows if kind == ".parquet" else None
    return Source(kind + fingerprint, total, lambda: _READERS[kind](path))


def require_map_style(dataset: Any, what: str) -> None:
    """Refuses streams and mappings of splits.

    Raises:
        DataError: `dataset` lacks `len()` or `[i]`.
    """
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"the {what} data set is {kind_of(dataset)}"
            + (f" with the keys {sorted(map(str, dataset))}" if isinstance(dataset, Mapping) else ""),
            "a data set must be map-style: it has len() and [i]",
            "pass one split, as a list or a datasets.Dataset",
        )


def _open_dataset(dataset: Any, what: str) -> Source:
    require_map_style(dataset, what)

    def records() -> Iterator[tuple[Record, Origin]]:
        for i in range(len(dataset)):
            with error_note(f"while reading sample {i} of data.{what}"):
                record = dataset[i]
            yield record, f"{what} sample {i}"

    # datasets.Dataset has a hash of its content; any other data set is hashed record by record.
    fingerprint = getattr(dataset, "_fingerprint", None) or _digest(
        json.dumps(record, default=_plain) for record, _ in records()
    )
    return Source(fingerprint, len(dataset), records)


def _read_jsonl(path: Path) -> Iterator[tuple[Record, Origin]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(line, f"{path}:{number}"), f"{path}:{number}"


def _read_json(path: Path) -> Iterator[tuple[Record, Origin]]:
    """Records of a JSON list, each with its first line; a .json file of JSON lines is read as jsonl."""
    with path.open("rb") as file:
        if not file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _read_jsonl(path)
            return
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_json(str(path), error) from error
    decoder = json.JSONDecoder()
    position, line = text.index("[") + 1, 1 + text[: text.index("[")].count("\n")
    while (start := _skip(text, position, " \t\r\n,")) < len(text) and text[start] != "]":
        line += text.count("\n", position, start)
        try:
            record, position = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise _not_json(f"{path}:{error.lineno}", error) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands
            raise _not_json(f"{path}:{line}", error) from error
        yield record, f"{path}:{line}"
        line += text.count("\n", start, position)
    if start >= len(text):
        raise _not_json(f"{path}:{line}", "the list is not closed")


def _read_parquet(path: Path) -> Iterator[tuple[Record, Origin]]:
    row = 0
    for batch in _open_parquet(path).iter_batches(batch_size=1024):
        for record in batch.to_pylist():
            yield record, f"{path}: row {row}"
            row += 1


_READERS = dict(zip(SUFFIXES, (_read_jsonl, _read_json, _read_parquet), strict=True))


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except ArrowInvalid as error:
        raise DataError(f"{path}: {error}", "the file must be parquet", "write the file again") from error


def _parse(line: bytes, origin: Origin) -> Record:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _not_json(origin, error) from error


def _not_json(origin: Origin, error: object) -> DataError:
    return DataError(f"{origin}: {error}", "every line must be one JSON record in UTF-8", "repair or delete the line")


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists, other values as their `repr`."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
