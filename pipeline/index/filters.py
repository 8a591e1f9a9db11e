"""Filters over the items' columns: conditions in Lance's SQL, checked before they are used.

Of `a = 1 b = 2` or `a = 1) OR (b = 2` Lance would take the first part in silence; here such a
filter is an error that says where it goes wrong. A filter cannot write, and it cannot take the
process or its memory: `pipeline.index.conditions` says what it may hold.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import lance
import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.conditions import FILTER_RULE, condition_sql, filterable
from pipeline.index.reader import Index, first_line

__all__ = ["FILTER_RULE", "check_filter", "filterable", "filtering", "matching_ids"]

_IS_ABOUT_FILES = re.compile(r"Not found: |LanceError\(IO\)|Object at location|No such file")


def check_filter(index: Index, filter: str) -> str:
    """The SQL of a filter that Lance is to execute; looks at no item.

    Raises:
        SpecError: For `filter`: as `condition_sql`; it is no condition; Lance cannot plan it.
    """
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
def filtering(index: Index, filter: str | None) -> Iterator[str | None]:
    """Items are filtered inside, by the SQL that is yielded; None for no filter.

    What comes of the filter and what of damaged files is told apart.

    Raises:
        SpecError: as `check_filter`; the filter fails on an item (a division by zero); data files
            are missing or damaged.
    """
    with index.reading():
        sql = None if filter is None else check_filter(index, filter)
        try:
            yield sql
        except (ValueError, OSError) as error:
            # By its class alone Lance does not tell one from the other.
            if filter is None or "Error applying filter" not in str(error):
                raise
            raise _unusable(filter, error) from None


def matching_ids(
    index: Index, filter: str, fragments: Sequence[lance.LanceFragment] | None = None
) -> pa.ChunkedArray:
    """Returns the ids of the items that a filter lets through, of some fragments or of all.

    Raises:
        SpecError: As `filtering`.
    """
    with filtering(index, filter) as condition:
        scanner = index.dataset.scanner(columns=["item_id"], filter=condition, fragments=fragments)
        return scanner.to_table()["item_id"]


def _unusable(filter: str, error: Exception) -> SpecError:
    line = first_line(error).removeprefix("Invalid user input: ")
    return SpecError("filter", filter, FILTER_RULE, f"cannot be evaluated ({line})")


def _problem(index: Index, filter: str) -> str | None:
    """What Lance says against a filter that it plans and does not run."""
    try:
        index.dataset.scanner(columns=["item_id"], filter=filter).explain_plan()
    except (ValueError, RuntimeError) as error:
        if _IS_ABOUT_FILES.search(str(error)):
            raise OSError(str(error)) from None  # as `reading` expects it
        return re.sub(r",? \S+\.rs:\d+:\d+", "", str(error))
    return None
