"""Ranks many queries for `jobs.search` and writes the result as a TREC run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jobs
from pipeline.config import Stopped

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.search.options import SearchOptions
    from pipeline.search.query import AnyQuery
    from pipeline.search.rerank import Reranker
    from pipeline.search.score import Ranking
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
    reranker: Reranker | None,
) -> None:
    """Ranks the items for all queries, writes the run to a file and prints the throughput."""
    from pipeline.eval.metrics import write_run
    from pipeline.search.options import EQUAL_WEIGHTS

    signal.signal(signal.SIGTERM, _stop)
    rows = searcher.items.select(options)
    num_items = len(searcher.items) if rows is None else len(rows)
    run = _Run(searcher, queries, options, reranker)
    print(f"{len(queries):,} queries x {num_items:,} items", flush=True)
    weights = "" if options.weights == EQUAL_WEIGHTS else "-{:g}-{:g}".format(*options.weights)
    tag = f"{options.column}.{options.score}{weights}{'.edje' if reranker else ''}"
    write_run(out, run.scores(), tag=tag)
    print(f"{run.throughput()}\n{len(queries):,} queries, {run.num_hits:,} hits: {out}")


def _stop(*_: object) -> None:
    raise Stopped("stopped before the run was written")


class _Run:
    """Ranks the items for a batch of queries and measures the time that each stage takes."""

    def __init__(
        self,
        searcher: Searcher,
        queries: Mapping[str, AnyQuery],
        options: SearchOptions,
        reranker: Reranker | None,
    ):
        from pipeline.schema import Composed

        if reranker is not None:
            reranker.check(searcher.index, list(queries.values()))
        self._searcher, self._queries, self._options = searcher, queries, options
        self._reranker = reranker
        self._needs_encoder = all(isinstance(q, str | bytes | Composed) for q in queries.values())
        self._encoding = self._scoring = self._reranking = 0.0  # seconds
        self._num_done = self.num_hits = 0

    def scores(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields the id of each query and its scores in descending order."""
        if self._needs_encoder:
            self._searcher.encoder(self._options.column)  # loads the encoder before timing
        options = self._options
        self._searcher.load(options.column, options.score, options.candidates)
        last_progress = time.monotonic()
        for batch in batches(self._queries):
            rankings = self._rank(list(batch.values()))
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

    def _rank(self, queries: list[AnyQuery]) -> list[Ranking]:
        start = time.perf_counter()
        options = self._options
        encoded = self._searcher.queries(queries, options.column)
        scoring = time.perf_counter()
        depth = 0 if self._reranker is None else self._reranker.rerank_depth
        rankings = self._searcher.rank_with(encoded, options.first_stage(depth))
        reranking = time.perf_counter()
        if self._reranker is not None:
            texts_or_images = self._reranker.check(self._searcher.index, queries)
            rankings = self._reranker.rerank(
                self._searcher, texts_or_images, rankings, self._options.k
            )
            self._reranking += time.perf_counter() - reranking
        self._encoding += scoring - start
        self._scoring += reranking - scoring
        return rankings

    def throughput(self) -> str:
        """Computes the throughput of each stage in queries per second."""
        stages = [("encoded", self._encoding)] if self._needs_encoder else []
        stages.append(("scored", self._scoring))
        if self._reranker is not None:
            stages.append(("reranked", self._reranking))
        return ", ".join(f"{name} {self._num_done / s:,.1f} queries/s" for name, s in stages)
