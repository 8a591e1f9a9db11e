"""Filters: SQL conditions over the columns of the items, validated before Lance executes them.

Lance silently ignores the rest of `a = 1 b = 2` or `a = 1) OR (b = 2`. Here such a filter is an
error with the position of the mistake. A filter cannot write, crash the process or exhaust its
memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import lance
import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.conditions import FILTER_RULE, condition_sql, filterable
from pipeline.index.reader import IndexReader, first_line

__all__ = ["FILTER_RULE", "check_filter", "filterable", "filtering", "matching_ids"]

_FILE_ERROR = re.compile(r"Not found: |LanceError\(IO\)|Object at location|No such file")


def check_filter(index: IndexReader, filter: str) -> str:
    """Validates a filter and returns its SQL. No items are read."""
    if not isinstance(filter, str) or not filter.strip():
        raise SpecError("filter", filter, FILTER_RULE)
    sql = condition_sql(filter, index.schema)
    problem = _problem(index, sql)
    if problem is None:
        return sql
    if "does not return a boolean" in problem:
        raise SpecError("filter", filter, FILTER_RULE, "does not evaluate to true or false")
    raise _unusable(filter, ValueError(problem))


@contextlib.contextmanager
def filtering(index: IndexReader, filter: str | None) -> Iterator[str | None]:
    """Context for filtered reads: yields the SQL of the filter, or None without a filter.

    Raises:
        SpecError: The filter is invalid or fails on an item, such as by a division by zero; or data
            files are missing or corrupted.
    """
    with index.corruption_errors():
        sql = None if filter is None else check_filter(index, filter)
        try:
            yield sql
        except (ValueError, OSError) as error:
            # Lance raises the same class for both.
            if filter is None or "Error applying filter" not in str(error):
                raise
            raise _unusable(filter, error) from None


def matching_ids(
    index: IndexReader, filter: str, fragments: Sequence[lance.LanceFragment] | None = None
) -> pa.ChunkedArray:
    """Returns the ids of all items that match a filter."""
    with filtering(index, filter) as condition:
        scanner = index.dataset.scanner(columns=["item_id"], filter=condition, fragments=fragments)
        return scanner.to_table()["item_id"]


def check_matches(number: int, filter: str, field: str = "filter") -> None:
    """Raises `SpecError` if a filter matches no items."""
    if not number:
        raise SpecError(field, filter, "a condition that matches items", "matches no items")


def _unusable(filter: str, error: Exception) -> SpecError:
    line = first_line(error).removeprefix("Invalid user input: ")
    return SpecError("filter", filter, FILTER_RULE, f"cannot be evaluated ({line})")


def _problem(index: IndexReader, filter: str) -> str | None:
    try:
        index.dataset.scanner(columns=["item_id"], filter=filter).explain_plan()
    except (ValueError, RuntimeError) as error:
        if _FILE_ERROR.search(str(error)):
            raise OSError(str(error)) from None  # `corruption_errors` translates it
        return re.sub(r",? \S+\.rs:\d+:\d+", "", str(error))
    return None
