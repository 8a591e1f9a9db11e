"""Measurement, on an index, of the exact results that a candidate generator keeps."""

from __future__ import annotations

import numpy as np

from pipeline.index.isotropy import mean_cosine
from pipeline.index.reader import IndexReader
from pipeline.search.candidates import EXACT
from pipeline.search.num_candidates import item_queries
from pipeline.search.searcher import Searcher

#: Queries that are searched, and the number of best items that are compared.
NUM_QUERIES, DEPTH = 32, 10
#: Maximum number of items that are searched: one shard of a larger index.
MAX_ITEMS = 50_000
#: Share of the exact results below which a generator is said to lose them.
MIN_KEPT = 0.5


def kept_by(searcher: Searcher, representation: str, candidates: str, seed: int = 0) -> float:
    """Returns the share of the exact best items that a candidate generator finds, or 1 for none.

    Queries are vectors of items with noise. The number of candidates is the default.
    """
    queries = item_queries(searcher.index, representation, NUM_QUERIES, seed)
    if not queries:
        return 1.0
    exact, found = (
        searcher.rank(queries, representation, k=DEPTH, candidates=name)
        for name in (EXACT, candidates)
    )
    shares = [
        len({*ranking.item_ids} & {*best.item_ids}) / len(best.item_ids)
        for ranking, best in zip(found, exact, strict=True)
        if best.item_ids
    ]
    return float(np.mean(shares)) if shares else 1.0


def generator_remark(index: IndexReader, representation: str, candidates: str) -> str:
    """Returns a sentence with the share of the exact results that a generator keeps.

    It is measured on at most `MAX_ITEMS` items, and is a warning if more than half are lost.
    """
    shards = max(1, -(-len(index) // MAX_ITEMS))
    searcher = Searcher(index, shard=(0, shards), cache=False)
    share = kept_by(searcher, representation, candidates)
    sentence = (
        f"{candidates} keeps {share:.0%} of the exact {DEPTH} best items of {representation},"
        f" by {NUM_QUERIES} queries from its vectors"
    )
    if share >= MIN_KEPT:
        return sentence
    cosine = mean_cosine(index, representation) or 0.0
    advice = "use another generator, more candidates or exact search"
    return f"warning: {sentence} (mean cosine of the vectors {cosine:.2f}); {advice}"
