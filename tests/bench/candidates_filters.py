"""Filtered search for the benchmark of candidate generators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from tests.bench.harness import recall, seconds_of

#: Maximum number of queries, which are searched twice for each row.
NUM_QUERIES = 64
HEADER = ["generator", "selected", "items", "exact ms", "generator ms", "recall@10", "search"]


def measure(
    searcher: Any,
    column: str,
    queries: Sequence[Any],
    name: str,
    shares: Sequence[float],
    filters: Sequence[str],
) -> Iterator[tuple[list[Any], dict[str, float]]]:
    """Measures searches in random shares of the items and with filters, exactly and by a generator.

    The result of the filter is given, because its evaluation does not depend on the generator.

    Yields:
        The cells of a row of the table, and its numbers.
    """
    from pipeline.search import score
    from pipeline.search.options import SearchOptions

    encoded = searcher.queries(queries[:NUM_QUERIES], column).split()
    exact, generator = (
        SearchOptions(representation=column, candidates="exact"),
        SearchOptions(representation=column, candidates=name),
    )
    rng = np.random.default_rng(0)
    num_items = len(searcher.items)
    selected = {f"{share:.2%}": np.flatnonzero(rng.random(num_items) < share) for share in shares}
    selected |= {text: searcher.items.select(SearchOptions(filter=text)) for text in filters}
    for label, rows in selected.items():
        reference, exact_ms = _rank(searcher.scorer, encoded, exact, rows)
        with mock.patch.object(score, "EXACT_ITEMS", 0):
            found, generator_ms = _rank(searcher.scorer, encoded, generator, rows)
        best, ids = ([ranking.item_ids for ranking in side] for side in (reference, found))
        found_share = recall(best, ids, 10)
        search = "exact" if searcher.scorer.scores_all(generator, rows) else name
        figures = {"exact_ms": exact_ms, "generator_ms": generator_ms, "recall@10": found_share}
        times = f"{exact_ms:.2f}", f"{generator_ms:.2f}"
        cells = [name, label, f"{len(rows):,}", *times, f"{found_share:.3f}", search]
        yield cells, figures


def _rank(
    scorer: Any, queries: Sequence[Any], options: Any, rows: np.ndarray
) -> tuple[list[Any], float]:
    rankings = [scorer.rank(query, options, rows)[0] for query in queries]  # also a warm-up
    times = [seconds_of(lambda q=q: scorer.rank(q, options, rows)) for q in queries]
    return rankings, 1000 * float(np.median(times))
