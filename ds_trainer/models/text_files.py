"""Text files of a checkpoint as transformers reads them: UTF-8 without a byte-order mark."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_SUFFIXES = (".json", ".jinja", ".txt")


@contextmanager
def without_byte_order_marks(folder: str) -> Iterator[str]:
    """The folder, or one beside it for the time of the block if a text file in it begins with a byte-order mark.

    Windows' editors write the mark; transformers refuses such a JSON file, and takes the mark for text of a template.
    The other folder has links to all files, and copies of those without their mark.
    """
    files = list(Path(folder).absolute().iterdir())
    marked = {path for path in files if path.suffix in _SUFFIXES and path.is_file() and _begins_with_mark(path)}
    if not marked:
        yield folder
        return
    with TemporaryDirectory() as copy:
        for path in files:
            if path in marked:
                Path(copy, path.name).write_bytes(path.read_bytes().removeprefix(BOM_UTF8))
            else:
                Path(copy, path.name).symlink_to(path)
        yield copy


def _begins_with_mark(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(BOM_UTF8)) == BOM_UTF8
