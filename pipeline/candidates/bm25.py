"""BM25 over the texts of items: counts of terms per item, statistics, and postings.

Shapes: B items, P pairs of an item and one of its terms, V terms.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline import config, extras
from pipeline.candidates import TextGenerator
from pipeline.texts import WORD, fold
from pipeline.tokens import lists_of

#: Language of the stop words and of the stemmer.
LANGUAGE = "english"
#: Number of the lower bits of an entry, which hold the count of a term. The upper bits are the hash
#: of the term. Among a million terms, two have the same hash with a probability of 0.4 %.
COUNT_BITS, HASH_BITS = 16, 47
MAX_COUNT = (1 << COUNT_BITS) - 1
#: Maximum number of words whose hashes are cached.
MAX_WORDS = 1 << 20


class Bm25(TextGenerator["Bm25.Spec"]):
    """Scores the texts of items by BM25 in Lucene's variant.

    The score of an item is the sum over the terms of the query of `idf * tf / (tf + k1 * (1 - b +
    b * length / mean length))`, where tf is the count of the term in the text, and `idf = log(1 +
    (N - df + 0.5) / (df + 0.5))` for df of N texts that contain the term.

    Terms are lower-case words of at least two characters. Composed and decomposed accents and other
    compatible forms of a character are equal, and the vowel signs of Arabic and Hebrew are ignored.
    English stop words are removed, and the
    remaining words are stemmed by the Snowball stemmer for English. For texts in other languages,
    it is therefore weak.

    The code of an item has one entry of 8 bytes for each of its terms. It does not depend on the
    statistics (N, df and the mean length), which are those of the items at the time of the fit.
    """

    class Spec(config.ComponentSpec):
        """Options of `Bm25`."""

        name: Literal["bm25"] = "bm25"
        k1: float = Field(1.2, ge=0, le=100)
        """Saturation of the count of a term. With 0, the count is ignored."""
        b: float = Field(0.75, ge=0, le=1)
        """Strength of the normalisation by the length of the text."""

    column_type = pa.list_(pa.int64())

    @classmethod
    def fit(cls, spec: Spec, texts: Iterable[Sequence[str | None]]) -> dict[str, np.ndarray]:
        """Computes the statistics of batches of texts. Null and empty texts are not counted.

        Returns:
            The hashes of the `terms` (V,) int64 in ascending order, the number of texts that
            contain each (`frequencies` (V,) int64), and the `totals` (2,) int64: the number of
            texts and the sum of their lengths.
        """
        statistics = Statistics()
        for batch in texts:
            statistics.add(encode(batch))
        return statistics.artefact()

    def encode(self, texts: Sequence[str | None]) -> pa.ListArray:
        """Returns the codes of texts, see `encode`."""
        return encode(texts)

    def postings(self, columns: Iterable[pa.Array]) -> Postings:
        """Builds the postings of items from the chunks of a column of codes."""
        chunks = [chunk.fill_null([]) if chunk.null_count else chunk for chunk in columns]
        lengths_B = [chunk.value_lengths().to_numpy().astype(np.int64) for chunk in chunks]
        entries = [chunk.flatten().to_numpy() for chunk in chunks]
        empty = np.empty(0, np.int64)
        return Postings(
            np.concatenate([empty, *entries]), np.concatenate([empty, *lengths_B]), self
        )

    def inverse_frequencies(self, terms: np.ndarray) -> np.ndarray:
        """Returns the idf (V,) float64 of terms. Those that the fit has not seen have df = 0."""
        known, num_texts = self.artefact["terms"], int(self.artefact["totals"][0])
        index = np.minimum(np.searchsorted(known, terms), max(len(known) - 1, 0))
        df = np.zeros(len(terms))
        if len(known):
            df = np.where(known[index] == terms, self.artefact["frequencies"][index], 0)
        return np.log1p((np.maximum(num_texts - df, 0) + 0.5) / (df + 0.5))

    @property
    def mean_length(self) -> float:
        """Mean number of terms per text."""
        num_texts, total_length = self.artefact["totals"].tolist()
        return total_length / max(num_texts, 1)


class Statistics:
    """Statistics of texts, which are collected from their codes."""

    def __init__(self) -> None:
        self._frequencies = Counter[int]()
        self._num_texts = self._total_length = 0

    def add(self, codes: pa.ListArray) -> None:
        """Adds the codes of texts. Null and empty texts are not counted."""
        entries = codes.flatten().to_numpy()
        self._frequencies.update((entries >> COUNT_BITS).tolist())
        self._num_texts += int((codes.value_lengths().to_numpy() > 0).sum())
        self._total_length += int((entries & MAX_COUNT).sum())

    def artefact(self) -> dict[str, np.ndarray]:
        """Returns the artefact of `Bm25`."""
        terms = np.array(sorted(self._frequencies), np.int64)
        frequencies = [self._frequencies[term] for term in terms.tolist()]
        return {
            "terms": terms,
            "frequencies": np.array(frequencies, np.int64),
            "totals": np.array([self._num_texts, self._total_length], np.int64),
        }


class Postings:
    """Weights of the terms of items, by term, for searching.

    Args:
        entries: (P,) int64, entries of the items, one item after another.
        counts_B: (B,) int64, number of entries per item.
        bm25: The fitted generator.
    """

    def __init__(self, entries: np.ndarray, counts_B: np.ndarray, bm25: Bm25):
        self._num_items = len(counts_B)
        terms, counts = entries >> COUNT_BITS, (entries & MAX_COUNT).astype(np.float64)
        items = np.repeat(np.arange(len(counts_B), dtype=np.int32), counts_B)
        lengths_B = np.bincount(items, counts, len(counts_B))
        k1, b = bm25.spec.k1, bm25.spec.b
        norms_B = k1 * (1 - b + b * lengths_B / max(bm25.mean_length, 1e-9))
        order = np.argsort(terms, kind="stable")
        self._terms, starts = np.unique(terms[order], return_index=True)
        self._starts = np.append(starts, len(terms)).astype(np.int64)
        idf = np.repeat(bm25.inverse_frequencies(self._terms), np.diff(self._starts))
        self._items = items[order]
        counts = counts[order]
        self._weights = (idf * counts / (counts + norms_B[self._items])).astype(np.float32)

    def __len__(self) -> int:
        return self._num_items

    @property
    def num_entries(self) -> int:
        """Number of pairs P of an item and one of its terms."""
        return len(self._items)

    def scores(self, query: str) -> np.ndarray:
        """Returns the scores (B,) float32 of all items, which are 0 without a common term."""
        scores = np.zeros(self._num_items, np.float32)
        for term, count in query_terms(query).items():
            index = int(np.searchsorted(self._terms, term))
            if index < len(self._terms) and self._terms[index] == term:
                postings = slice(self._starts[index], self._starts[index + 1])
                scores[self._items[postings]] += count * self._weights[postings]
        return scores


def encode(texts: Sequence[str | None]) -> pa.ListArray:
    """Returns the codes of texts: the ascending entries of their terms, as lists of int64.

    Null and empty texts have no entries. A text without terms has one entry for the empty string,
    which no query contains, as in bm25s.
    """
    hash_word = _word_hashes()
    entries: list[int] = []
    counts_B = np.zeros(len(texts), np.int64)
    for number, text in enumerate(texts):
        if text:
            words = _words(text)
            hashes = [term for word in words if (term := hash_word(word)) is not None]
            counted = Counter(hashes or [term_hash("")])
            entries += sorted((h << COUNT_BITS) | min(n, MAX_COUNT) for h, n in counted.items())
            counts_B[number] = len(counted)
    return lists_of(np.array(entries, np.int64), counts_B)


def query_terms(query: str) -> dict[int, int]:
    """Returns the hashes of the terms of a query, and how often they occur."""
    hash_word = _word_hashes()
    return Counter(term for word in _words(query) if (term := hash_word(word)) is not None)


def _words(text: str) -> list[str]:
    """Returns the folded words of a text that have at least two characters.

    >>> _words("A re\u0301sume\u0301 of 3 \ufb01sh")
    ['résumé', 'of', 'fish']
    """
    return [word for word in WORD.findall(fold(text)) if len(word) > 1]


@functools.cache
def _word_hashes() -> Callable[[str], int | None]:
    """Returns the function that maps a word to the hash of its term, or None for a stop word.

    Raises:
        MissingExtra: The packages of the extra `report` are not installed.
    """
    extras.require("bm25s", "Stemmer")
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN

    stem, stop_words = Stemmer.Stemmer(LANGUAGE).stemWord, frozenset(STOPWORDS_EN)

    @functools.lru_cache(MAX_WORDS)
    def hash_word(word: str) -> int | None:
        return None if word in stop_words else term_hash(stem(word))

    return hash_word


def term_hash(term: str) -> int:
    """Returns the hash of a term, a number of 47 bits.

    >>> term_hash("wing").bit_length() <= 47
    True
    """
    content = hashlib.blake2b(term.encode(), digest_size=8).digest()
    return int.from_bytes(content, "little") >> (64 - HASH_BITS)
