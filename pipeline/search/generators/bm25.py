"""BM25 over the texts of items: counts of terms per item, statistics, and postings.

bm25s computes the statistics of the rows that it indexes, and Lance's full-text index partly those
of the rows that it reads. The scores of a shard would differ from those of the whole.

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
from pipeline.data.texts import WORD, fold
from pipeline.tokens import flat_from_arrow, lists_of

#: Language of the stop words and of the stemmer.
LANGUAGE = "english"
#: Number of the lower bits of an entry, which hold the count of a term. The upper bits are the hash
#: of the term. Among a million terms, two have the same hash with a probability of 0.4 %.
COUNT_BITS, HASH_BITS = 16, 47
MAX_COUNT = (1 << COUNT_BITS) - 1
#: Maximum number of words whose hashes are cached.
MAX_WORDS = 1 << 20


class Bm25:
    """Scores the texts of items by BM25 in Lucene's variant.

    The score of an item is the sum over the terms of the query of `idf * tf / (tf + k1 * (1 - b +
    b * length / mean length))`, where tf is the count of the term in the text, and `idf = log(1 +
    (N - df + 0.5) / (df + 0.5))` for df of N texts that contain the term.

    Terms are lower-case words of at least two characters. Composed and decomposed accents and other
    compatible forms of a character are equal, and the vowel signs of Arabic and Hebrew are ignored.
    English stop words are removed, and the remaining words are stemmed by the Snowball stemmer for
    English. For texts in other languages, it is therefore weak.

    The code of an item has one entry of 8 bytes for each of its terms. It does not depend on the
    statistics (N, df and the mean length), which are those of the items at the time of the fit.
    Therefore, the scores of an item are equal in all shards and selections.
    """

    class Spec(config.ComponentSpec):
        """Options of `Bm25`."""

        name: Literal["bm25"] = "bm25"
        k1: float = Field(1.2, ge=0, le=100)
        """Saturation of the count of a term. With 0, the count is ignored."""
        b: float = Field(0.75, ge=0, le=1)
        """Strength of the normalisation by the length of the text."""

    # The interface that jobs use, as in `Ivf`.
    source = "text_column"
    column_type = pa.list_(pa.int64())
    batch_rows = 1024

    def __init__(self, spec: Spec, artefact: dict[str, np.ndarray]):
        self.spec, self.artefact = spec, artefact

    @classmethod
    def fit(cls, spec: Spec, texts: Iterable[Sequence[str | None]]) -> dict[str, np.ndarray]:
        """Computes the `statistics` of batches of texts."""
        return statistics(map(encode, texts))

    def codes(self, column: pa.ChunkedArray, decode: object = None) -> pa.ListArray:
        """Returns the codes of a column of texts, see `encode`."""
        return encode(column.to_pylist())

    def inverse_frequencies(self, terms: np.ndarray) -> np.ndarray:
        """Returns the idf (V,) float64 of terms. Those that the fit has not seen have df = 0."""
        num_texts, _ = self.artefact["totals"].tolist()
        known, frequencies = self.artefact["terms"], self.artefact["frequencies"]
        index = np.searchsorted(known, terms)
        df = np.where(np.append(known, -1)[index] == terms, np.append(frequencies, 0)[index], 0)
        return np.log1p((num_texts - df + 0.5) / (df + 0.5))

    @property
    def mean_length(self) -> float:
        """Mean number of terms per text."""
        num_texts, total_length = self.artefact["totals"].tolist()
        return total_length / max(num_texts, 1)


class Postings:
    """Weights of the terms of items, by term, for searching chunks of a column of codes."""

    #: Number of vectors of the codes.
    num_vectors = 0

    def __init__(self, bm25: Bm25, codes: Iterable[pa.Array]):
        chunks = map(flat_from_arrow, [pa.array([], bm25.column_type), *codes])
        entries, counts_B = map(np.concatenate, zip(*chunks, strict=True))
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

    @property
    def is_coded(self) -> np.ndarray:
        """True (B,) for all items, since those without a text have a code without terms."""
        return np.ones(self._num_items, bool)

    @property
    def item_bytes(self) -> float:
        """Mean number of bytes of the code of an item."""
        return 8 * len(self._items) / max(self._num_items, 1)

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


def statistics(codes: Iterable[pa.ListArray]) -> dict[str, np.ndarray]:
    """Computes the artefact of `Bm25` from the codes of texts. Those without entries do not count.

    Returns:
        The hashes of the `terms` (V,) int64, ascending, the number of texts that contain each
        (`frequencies` (V,) int64), and the `totals` (2,) int64: the number of texts and the sum of
        their lengths.
    """
    frequencies = Counter[int]()
    num_texts = total_length = 0
    for chunk in codes:
        entries = chunk.flatten().to_numpy()
        frequencies.update((entries >> COUNT_BITS).tolist())
        num_texts += int((chunk.value_lengths().to_numpy() > 0).sum())
        total_length += int((entries & MAX_COUNT).sum())
    terms = sorted(frequencies)
    return {
        "terms": np.array(terms, np.int64),
        "frequencies": np.array([frequencies[term] for term in terms], np.int64),
        "totals": np.array([num_texts, total_length], np.int64),
    }


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
    """Returns the function that maps a word to the hash of its term, or None for a stop word."""
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
