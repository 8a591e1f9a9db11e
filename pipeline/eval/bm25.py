"""BM25 over the texts of an index, which is the lexical baseline of evaluations."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from pipeline.index.reader import IndexReader, combine_filters
from pipeline.search.generators import bm25
from pipeline.search.score import top_rows

#: Filter of the items that BM25 can find, by the name of the text column.
HAS_TEXT = "{} <> ''"


def has_texts(index: IndexReader, column: str = "text", filter: str | None = None) -> bool:
    """Checks whether any item of the index has a text."""
    filter = combine_filters(filter, HAS_TEXT.format(column))
    return any(batch.num_rows for batch in index.batches(["item_id"], filter=filter))


class Bm25:
    """BM25 over a text column of an index, see `pipeline.search.generators.bm25`.

    The statistics are those of the searched items. Items that have no text or share no word with
    the query are not returned.
    """

    def __init__(
        self, index: IndexReader, judged: str, column: str = "text", filter: str | None = None
    ):
        """Builds the postings from a stream of texts; only ids and postings are in memory."""
        item_ids: list[str] = []
        parent_ids: list[str] = []
        codes: list[pa.Array] = []
        filter = combine_filters(filter, HAS_TEXT.format(column))
        for batch in index.batches(["item_id", "parent_id", column], filter=filter):
            item_ids += batch["item_id"].to_pylist()
            parent_ids += batch["parent_id"].to_pylist()
            codes.append(bm25.encode(batch[column].to_pylist()))
        generator = bm25.Bm25(bm25.Bm25.Spec(), bm25.statistics(codes))
        self._postings = bm25.Postings(generator, codes)
        self._names = np.array(parent_ids if judged == "parent" else item_ids, dtype=object)
        self._order = np.argsort(np.argsort(item_ids))  # breaks ties by item id, as search does
        self._groups = np.unique(parent_ids, return_inverse=True)[1] if judged == "parent" else None

    def rank(
        self, queries: Sequence[str], k: int, pool: Collection[str] | None = None
    ) -> list[dict[str, float]]:
        """Returns the scores of the k best documents for each query in descending order."""
        pool = None if pool is None else set(pool)
        listed = np.array([pool is None or name in pool for name in self._names], bool)
        rankings = []
        for query in queries:
            scores = self._postings.scores(query)
            scores = np.where(listed & (scores > 0), scores, -np.inf)
            best = top_rows(scores, None, self._order, k, self._groups)
            rankings.append({self._names[row]: float(scores[row]) for row in best})
        return rankings
