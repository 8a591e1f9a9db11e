"""Candidate pools: the documents that are ranked for each query of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Ids of the documents that are ranked for a query, or None for all documents of the index.
Pool = tuple[str, ...] | None


def map_by_pool(
    function: Callable[[list[int], Pool], Sequence[T]],
    numbers: Sequence[int],
    query_ids: Sequence[str],
    pools: Mapping[str, Sequence[str]] | None,
) -> list[T]:
    """Calls a function once per distinct pool and returns its results in the order of the queries.

    The function gets the numbers of some queries and their common pool, which is None to rank all
    documents. Queries without an entry rank no document.

    >>> pools = {"a": ("x",), "b": ("y", "z"), "c": ("x",)}
    >>> sizes = lambda numbers, pool: [len(pool)] * len(numbers)
    >>> map_by_pool(sizes, [0, 1, 2], ["a", "b", "c"], pools)
    [1, 2, 1]
    """
    if pools is None:
        return list(function(list(numbers), None))
    by_pool: dict[tuple[str, ...], list[int]] = {}
    for position, number in enumerate(numbers):
        by_pool.setdefault(tuple(pools.get(query_ids[number], ())), []).append(position)
    results: dict[int, T] = {}
    for pool, positions in by_pool.items():
        found = function([numbers[position] for position in positions], pool)
        results.update(zip(positions, found, strict=True))
    return [results[position] for position in range(len(numbers))]
