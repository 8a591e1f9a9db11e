"""BM25 over the texts of an index: what words alone reach, the line that vectors have to beat."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline import extras
from pipeline.index.reader import Index, both
from pipeline.search.score import top_rows

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of every index it builds

#: Everything that decides a ranking. k1 and b are Lucene's own defaults.
SETTINGS = {"method": "lucene", "k1": 1.2, "b": 0.75}
LANGUAGE = "english"


#: Of a row that BM25 can find, by its column of texts.
HAS_TEXT = "{} <> ''"


def has_texts(index: Index, column: str = "text", filter: str | None = None) -> bool:
    """Whether any item of the index has a text."""
    filter = both(filter, HAS_TEXT.format(column))
    return any(batch.num_rows for batch in index.batches(["item_id"], filter=filter))


class Bm25:
    """BM25 (Lucene's variant, k1 = 1.2, b = 0.75) over a column of texts of an index.

    Texts and queries are lower-cased words of at least two characters, without English stop words,
    cut to stems by Snowball's English stemmer. On texts in other languages it is a weak baseline.
    Items without a text are never hits, nor are items that share no word with the query.
    """

    def __init__(self, index: Index, judged: str, column: str = "text", filter: str | None = None):
        """Reads the texts in a stream; only the ids and the postings stay in memory.

        Args:
            index: Index whose items are searched.
            judged: "parent" to rank parents by their best item, or "item" to rank items.
            column: Column that is searched, "text" or "caption".
            filter: SQL condition of the items; None for all of them.
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
        for batch in index.batches(columns, filter=both(filter, HAS_TEXT.format(column))):
            item_ids += batch["item_id"].to_pylist()
            parent_ids += batch["parent_id"].to_pylist()
            words += self._words(batch[column].to_pylist(), update_vocab=True)
        self._bm25 = bm25s.BM25(**SETTINGS)
        vocabulary = self._tokenizer.get_vocab_dict()
        self._bm25.index((words, vocabulary), show_progress=False)
        self._no_word = vocabulary.get("")  # bm25s gives it to a text of stop words alone

        self._names = parent_ids if judged == "parent" else item_ids
        self._order = np.argsort(np.argsort(item_ids))  # ties as in every search: by item id
        self._groups = np.unique(parent_ids, return_inverse=True)[1] if judged == "parent" else None

    def rank(self, queries: Sequence[str], k: int) -> list[dict[str, float]]:
        """For each query the scores of its at most k best documents, best first."""
        return [self._rank(words, k) for words in self._words(queries, update_vocab=False)]

    def _rank(self, words: list[int], k: int) -> dict[str, float]:
        words = [word for word in words if word != self._no_word]
        if not words:
            return {}
        scores = self._bm25.get_scores(words)
        scores[scores <= 0] = -np.inf
        best = top_rows(scores, None, self._order, k, self._groups)
        return {self._names[row]: float(scores[row]) for row in best}

    def _words(self, texts: Sequence[str], **how: Any) -> list[list[int]]:
        return self._tokenizer.tokenize(list(texts), return_as="ids", show_progress=False, **how)
