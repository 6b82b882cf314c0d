"""A table is one test, which fails with every row that fails."""

import pytest

from tests.helpers.table import table


@table("value, limit", [(1, 2), (5, 3), (2, 3), (9, 8)], ids=["one", "five", "two", "nine"])
def check(value, limit):
    assert value < limit


@table("inner", ["a", "b"])
@table("kind", [ValueError, KeyError])
def raises(kind, inner):
    with pytest.raises(ValueError):
        raise kind(inner)


def test_all_rows_that_fail_are_listed_and_no_other():
    with pytest.raises(pytest.fail.Exception, match="2 of 4 rows fail") as caught:
        check()
    assert "five\n" in str(caught.value) and "nine\n" in str(caught.value)
    assert "one\n" not in str(caught.value) and "two\n" not in str(caught.value)


def test_tables_multiply_and_any_error_is_a_fault():
    with pytest.raises(pytest.fail.Exception, match="2 of 2 rows fail") as caught:
        raises()
    assert str(caught.value).count("KeyError: 'a'") == str(caught.value).count("KeyError: 'b'") == 1


def test_an_empty_table_is_refused():
    with pytest.raises(AssertionError, match="checks nothing"):
        table("value", [])
