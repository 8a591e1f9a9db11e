"""Measurement, on an index, of the exact results that a candidate generator keeps."""

from __future__ import annotations

import numpy as np

from pipeline.index.isotropy import mean_cosine, sample_vectors
from pipeline.index.reader import IndexReader
from pipeline.search.candidates import EXACT
from pipeline.search.searcher import Searcher

#: Queries that are searched, the vectors of each, and the number of best items that are compared.
NUM_QUERIES, QUERY_VECTORS, DEPTH = 32, 16, 10
#: Norm of the noise that is added to the unit vectors of a query.
NOISE = 1.0
#: Maximum number of items that are searched: one shard of a larger index.
MAX_ITEMS = 50_000
#: Share of the exact results below which a generator is said to lose them.
MIN_KEPT = 0.5


def kept_by(searcher: Searcher, representation: str, candidates: str, seed: int = 0) -> float:
    """Returns the share of the exact best items that a candidate generator finds, or 1 for none.

    Queries are vectors of items with noise. The number of candidates is the default.
    """
    vectors_TD, lengths_B = sample_vectors(searcher.index, representation, NUM_QUERIES)
    rng = np.random.default_rng(seed)
    queries = []
    for vectors_ND in np.split(vectors_TD, np.cumsum(lengths_B)[:-1]):
        chosen_MD = vectors_ND[rng.permutation(len(vectors_ND))[:QUERY_VECTORS]]
        noise_MD = rng.standard_normal(chosen_MD.shape) / np.sqrt(chosen_MD.shape[1])
        if len(chosen_MD):
            queries.append((chosen_MD + NOISE * noise_MD).astype(np.float32))
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
