"""Ranks many queries for `jobs.search` and writes the result as a TREC run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jobs
from pipeline.config import Stopped

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.search.options import SearchOptions
    from pipeline.search.query import AnyQuery
    from pipeline.search.rerankers import Reranker
    from pipeline.search.searcher import Searcher

#: Number of queries that are encoded and scored per batch, which bounds memory.
QUERY_BATCH = 256
#: Interval between progress lines, in seconds.
PROGRESS_SECONDS = 10.0


def batches(queries: Mapping[str, AnyQuery]) -> Iterator[dict[str, AnyQuery]]:
    """Yields the queries in batches of at most `QUERY_BATCH`, as mappings from id to query."""
    pairs = list(queries.items())
    for first in range(0, len(pairs), QUERY_BATCH):
        yield dict(pairs[first : first + QUERY_BATCH])


def write(
    out: str,
    searcher: Searcher,
    queries: Mapping[str, AnyQuery],
    options: SearchOptions,
    rerankers: Sequence[Reranker[Any]],
    negative: str | None = None,
) -> None:
    """Ranks the items for all queries, writes the run to a file and prints the throughput."""
    from pipeline.eval.metrics import write_run
    from pipeline.search.media import Unencoded
    from pipeline.search.options import EQUAL_WEIGHTS

    signal.signal(signal.SIGTERM, _stop)
    rows = searcher.items.select(options)
    num_items = len(searcher.items) if rows is None else len(rows)
    for reranker in rerankers:
        reranker.report = jobs.say
        reranker.check(searcher.index, list(queries.values()))
    print(f"{len(queries):,} queries x {num_items:,} items", flush=True)
    if all(isinstance(query, Unencoded) for query in queries.values()):
        searcher.encoder(options.column)  # loads the encoder before timing
    searcher.load(options.column, options.score, options.candidates)
    run = _Run(searcher, queries, options, rerankers, negative)
    weights = "" if options.weights == EQUAL_WEIGHTS else "-{:g}-{:g}".format(*options.weights)
    tag = f"{options.column}.{options.score}{weights}"
    tag += "".join(f".{reranker.spec.title}" for reranker in rerankers)
    write_run(out, run.scores(), tag=tag)
    print(f"{run.throughput()}\n{len(queries):,} queries, {run.num_hits:,} hits: {out}")


def _stop(*_: object) -> None:
    raise Stopped("stopped before the run was written")


class _Run:
    """Ranks the items for all queries in batches and measures the throughput without loading."""

    def __init__(
        self,
        searcher: Searcher,
        queries: Mapping[str, AnyQuery],
        options: SearchOptions,
        rerankers: Sequence[Reranker[Any]],
        negative: str | None,
    ):
        self._searcher, self._queries = searcher, queries
        self._options, self._rerankers, self._negative = options, rerankers, negative
        self._seconds = 0.0
        self._num_done = self.num_hits = 0

    def scores(self) -> Iterator[tuple[str, dict[str, float]]]:
        last_progress = time.monotonic()
        for batch in batches(self._queries):
            start = time.perf_counter()
            rankings = self._searcher.rank_with(
                [*batch.values()], self._options, self._rerankers, self._negative
            )
            self._seconds += time.perf_counter() - start
            for query_id, ranking in zip(batch, rankings, strict=True):
                grouped = self._options.group_by
                scores = ranking.scores_by_parent() if grouped else ranking.scores_by_item()
                self.num_hits += len(scores)
                yield query_id, scores
            self._num_done += len(batch)
            is_last = self._num_done == len(self._queries)
            if not is_last and time.monotonic() - last_progress > PROGRESS_SECONDS:
                last_progress = time.monotonic()
                progress = f"{self._num_done:,} of {len(self._queries):,} queries"
                jobs.say(f"{progress}; {self.throughput()}")

    def throughput(self) -> str:
        return f"{self._num_done / self._seconds:,.1f} queries/s"
