"""Numbers of candidates, by the measured recall of the exact results on an index.

The number of `ivf` is the smallest such that the items with its best scores contain a wanted share
of the exact best items of a sample of queries. It is measured for several numbers of probed lists,
and the one with the lowest estimated time is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from pipeline.index.isotropy import sample_vectors
from pipeline.index.reader import IndexReader
from pipeline.search.candidates import DEPTHS, EXACT, QUERY_TOKENS, Numbers, ivf_time
from pipeline.search.query import AnyQuery
from pipeline.search.searcher import Searcher

#: Maximum number of queries. With 64, the numbers for a recall of 0.98 have one of 0.960 to 0.988
#: for other queries, and with 256 one of 0.972 to 0.985 (docs/results/candidates.md).
NUM_QUERIES = 256
#: Numbers of probed lists per query token that are compared.
PROBES = (8, 16, 32, 64, 128, 256)
#: Number of queries that are scored together, which bounds the size of the score matrix.
BATCH = 4
#: Maximum number of items that are searched: one shard of a larger index.
MAX_ITEMS = 4_000_000
#: Number of words of a query that is a passage of an item. Longer passages need fewer candidates
#: than real questions (docs/results/candidates.md).
QUERY_WORDS = 2
#: Number of vectors of a query that consists of vectors of an item, and the norm of their noise.
QUERY_VECTORS, NOISE = 4, 1.0


def measure(
    index: IndexReader, column: str, queries: Sequence[AnyQuery], *, recall: float
) -> Numbers | None:
    """Measures the numbers of the generator of a column with evenly spaced ones of given queries.

    Without any, they are passages of the items' texts if the query encoder accepts texts, otherwise
    vectors of items with noise. Returns None if no item has any.
    """
    representation = index.candidates_columns[column].representation
    is_given = bool(queries)
    if not queries:
        queries = _text_queries(index, representation) or _item_queries(index, representation)
    if not queries:
        return None
    queries = queries[:: -(-len(queries) // NUM_QUERIES)]  # a log can be sorted
    shards = max(1, -(-len(index) // MAX_ITEMS))
    searcher = Searcher(index, shard=(0, shards))
    encoded = searcher.queries(list(queries), representation)
    best = searcher.rank(encoded, representation, k=max(DEPTHS), candidates=EXACT)

    def counts(num_probes: int) -> list[int]:
        ranks: list[np.ndarray] = []  # of the best items of each query
        for first in range(0, len(encoded), BATCH):
            batch = encoded.part(first, first + BATCH)
            rows = [ranking.rows for ranking in best[first : first + BATCH]]
            ranks += searcher.scorer.ranks(batch, column, rows, num_probes)
        loss = 1 - recall
        return [shards * _number(np.concatenate([r[:n] for r in ranks]), loss) for n in DEPTHS]

    packed = searcher.scorer.vectors(representation)
    item_vectors = packed.num_vectors / max(len(packed), 1)
    num_tokens = sum(encoded.num_tokens) / len(encoded) if is_given else QUERY_TOKENS
    found = {num_probes: counts(num_probes) for num_probes in PROBES}
    probes = [
        min(found, key=lambda p: ivf_time(p, num_tokens, found[p][i], item_vectors))
        for i in range(len(DEPTHS))
    ]
    return Numbers(recall, len(index), [found[p][i] for i, p in enumerate(probes)], probes)


def _number(ranks: np.ndarray, loss: float) -> int:
    """Returns the smallest number of best items that contain all but a share of some items.

    >>> _number(np.array([5, 1, 2, 90, 3]), 0.2)
    5
    """
    num_kept = int(np.ceil((1 - loss) * len(ranks) - 1e-9))
    return int(np.sort(ranks)[num_kept - 1]) if num_kept else 1


def _text_queries(index: IndexReader, representation: str) -> list[str]:
    """Returns passages of evenly spaced items, or none if texts cannot be encoded as queries."""
    info = index.representation(representation)
    if "text" not in info.encoder.query_kinds or info.text_column not in index.schema.names:
        return []
    rows = np.linspace(0, max(len(index) - 1, 0), min(NUM_QUERIES, len(index))).astype(int)
    with index.corruption_errors():
        texts = index.dataset.take(rows.tolist(), columns=[info.text_column])[info.text_column]
    rng, queries = np.random.default_rng(0), []
    for text in texts.to_pylist():
        if words := re.findall(r"\S+", text or ""):
            start = int(rng.integers(max(len(words) - QUERY_WORDS, 0) + 1))
            queries.append(" ".join(words[start : start + QUERY_WORDS]))
    return queries


def _item_queries(index: IndexReader, representation: str) -> list[AnyQuery]:
    """Returns queries that consist of vectors of evenly spaced items with noise."""
    vectors_TD, lengths_B = sample_vectors(index, representation, NUM_QUERIES)
    rng = np.random.default_rng(0)
    queries: list[AnyQuery] = []
    for vectors_ND in np.split(vectors_TD, np.cumsum(lengths_B)[:-1]):
        chosen_MD = vectors_ND[rng.permutation(len(vectors_ND))[:QUERY_VECTORS]]
        noise_MD = rng.standard_normal(chosen_MD.shape) / np.sqrt(chosen_MD.shape[1])
        if len(chosen_MD):
            queries.append((chosen_MD + NOISE * noise_MD).astype(np.float32))
    return queries
