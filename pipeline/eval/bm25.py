"""BM25 over the texts of an index, which is the lexical baseline of evaluations."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pipeline import extras
from pipeline.index.reader import Index, combine_filters
from pipeline.search.score import top_rows

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs every index that it builds

#: Ranking parameters. K1 and b are Lucene's defaults.
SETTINGS = {"method": "lucene", "k1": 1.2, "b": 0.75}
LANGUAGE = "english"


#: Filter of the items that BM25 can find, by the name of the text column.
HAS_TEXT = "{} <> ''"


def has_texts(index: Index, column: str = "text", filter: str | None = None) -> bool:
    """Checks whether any item of the index has a text."""
    filter = combine_filters(filter, HAS_TEXT.format(column))
    return any(batch.num_rows for batch in index.batches(["item_id"], filter=filter))


class Bm25:
    """BM25 in Lucene's variant (k1 = 1.2, b = 0.75) over a text column of an index.

    Tokens are lower-case words of at least two characters. English stop words are removed, and the
    remaining words are stemmed by the Snowball stemmer for English. For texts in other languages,
    it is therefore a weak baseline. Items that have no text or share no word with the query are not
    returned.
    """

    def __init__(self, index: Index, judged: str, column: str = "text", filter: str | None = None):
        """Builds the index from a stream of texts.

        Only the ids and the postings are kept in memory.

        Args:
            index: Index whose items are searched.
            judged: "parent" to rank parents by their best item, or "item" to rank items.
            column: Column that is searched, "text" or "caption".
            filter: SQL condition on the items, or None for all of them.
        """
        extras.require("bm25s", "Stemmer")
        import bm25s
        import Stemmer
        from bm25s.tokenization import Tokenizer

        stem = Stemmer.Stemmer(LANGUAGE).stemWord
        self._tokenizer = Tokenizer(stemmer=stem, stopwords=LANGUAGE)
        item_ids: list[str] = []
        parent_ids: list[str] = []
        words: list[list[int]] = []
        columns = ["item_id", "parent_id", column]
        for batch in index.batches(
            columns, filter=combine_filters(filter, HAS_TEXT.format(column))
        ):
            item_ids += batch["item_id"].to_pylist()
            parent_ids += batch["parent_id"].to_pylist()
            words += self._words(batch[column].to_pylist(), update_vocab=True)
        self._bm25 = bm25s.BM25(**SETTINGS)
        vocabulary = self._tokenizer.get_vocab_dict()
        self._bm25.index((words, vocabulary), show_progress=False)
        self._empty_token = vocabulary.get("")  # of texts that have only stop words

        self._names = np.array(parent_ids if judged == "parent" else item_ids, dtype=object)
        self._order = np.argsort(np.argsort(item_ids))  # breaks ties by item id, as search does
        self._groups = np.unique(parent_ids, return_inverse=True)[1] if judged == "parent" else None

    def rank(
        self, queries: Sequence[str], k: int, pool: Collection[str] | None = None
    ) -> list[dict[str, float]]:
        """Returns the scores of the k best documents for each query in descending order.

        Args:
            queries: Texts of the queries.
            k: Maximum number of documents per query.
            pool: Ids of the documents to rank, or None to rank all documents.
        """
        outside = None
        if pool is not None:
            listed = set(pool)
            outside = np.array([name not in listed for name in self._names], bool)
        words = self._words(queries, update_vocab=False)
        return [self._rank(query_words, k, outside) for query_words in words]

    def _rank(self, words: list[int], k: int, outside: np.ndarray | None) -> dict[str, float]:
        words = [word for word in words if word != self._empty_token]
        if not words:
            return {}
        scores = self._bm25.get_scores(words)
        scores[scores <= 0] = -np.inf
        if outside is not None:
            scores[outside] = -np.inf
        best = top_rows(scores, None, self._order, k, self._groups)
        return {self._names[row]: float(scores[row]) for row in best}

    def _words(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        return self._tokenizer.tokenize(
            list(texts), return_as="ids", show_progress=False, **options
        )
