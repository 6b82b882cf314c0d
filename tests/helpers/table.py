"""One test of a table: as `pytest.mark.parametrize`, but a single item that lists every row that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def table(
    names: str | tuple[str, ...], rows: Iterable[Any], ids: Callable[[Any], Any] | Iterable[str] | None = None
) -> Callable[[Callable], Callable]:
    """Runs the decorated test on each row, and fails with what was found of all rows that fail.

    Fixtures are those of one test: for checks that leave nothing behind in them.

    Args:
        names: Of the arguments that a row gives, as for `pytest.mark.parametrize`.
        rows: Values of these; a plain value where there is one name.
        ids: What a fault names its row by, or a function of each of its values; without, the row itself.
    """
    single = isinstance(names, str) and "," not in names
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    listed = [(row,) if single else tuple(row) for row in rows]
    assert listed, "an empty table checks nothing"
    if callable(ids):
        labels = ["-".join(str(ids(value)) for value in row) for row in listed]
    else:
        labels = [str(label) for label in (listed if ids is None else ids)]

    def decorate(check: Callable) -> Callable:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            faults = []
            for label, row in zip(labels, listed, strict=True):
                try:
                    check(**fixtures, **dict(zip(keys, row, strict=True)))
                # A row's error is as much a fault as a failed assertion; `Failed` is what `pytest.raises` raises.
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  listed, not hidden
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    faults.append(f"{label}\n{place.filename}:{place.lineno}: {type(error).__name__}: {error}")
            if faults:
                pytest.fail("\n\n".join([f"{len(faults)} of {len(listed)} rows fail", *faults]), pytrace=False)

        parameters = inspect.signature(check).parameters
        kept = [parameter for name, parameter in parameters.items() if name not in keys]
        test.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return test

    return decorate
