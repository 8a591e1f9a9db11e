"""Similarity maps: similarities between a query and the words of an item.

A map compares each query token with each input token of an item, by the vector of the input token.
A merged vector is equally similar to all of its words, so the words of a representation that merges
tokens are compared by their vectors in an uncompressed representation, if the index has one.
Otherwise, and on request, they have the similarity of the vector that represents them: such a map
shows which parts the vectors of the item can distinguish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from pipeline.search.explain import (
    NO_SPAN,
    contributions,
    find_passages,
    token_location,
)
from pipeline.search.html import map_html
from pipeline.search.query import AnyQuery, Queries
from pipeline.search.results import Box, Map, Passage, Rounded, Word
from pipeline.search.searcher import Searcher
from pipeline.search.stored_items import read_stored_item, token_representation, token_vectors


class SimilarityMap(Map):
    """Similarities between the words of an item and the M tokens of a query."""

    item_id: str
    """Id of the item."""
    representation: str
    """Name of the representation."""
    score: float
    """MaxSim score of the item."""
    contributions: tuple[Rounded, ...]
    """Contribution of each query token, see `explain.contributions`."""
    passages: tuple[Passage, ...]
    """Best-matching passages, best first."""

    def __repr__(self) -> str:
        sizes = f"{len(self.query_tokens)} query tokens, {len(self.words)} words"
        return f"SimilarityMap({self.item_id!r}, {self.representation!r}, {sizes})"

    def _repr_html_(self) -> str:
        return map_html(self)

    @property
    def is_shared(self) -> bool:
        """True if some words have the similarities of a vector that they share."""
        num_words = Counter(word.vector for word in self.words if word.vector is not None)
        return self.evidence == self.representation and max(num_words.values(), default=0) > 1

    def values(self, query_token: int | None = None) -> np.ndarray:
        """Returns the value of each word (W,).

        It is the similarity with a query token, or the highlight. NaN marks words without a vector.
        """
        if query_token is None:
            return np.array([word.highlight for word in self.words])
        return np.array([word.similarities[query_token] for word in self.words], float)

    def best_word(self, query_token: int | None = None) -> Word:
        """Returns the word with the highest value. The first one is returned in case of a tie."""
        return self.words[int(np.nanargmax(self.values(query_token)))]

    def lines(self, passage: Passage) -> list[Box]:
        """Returns a bounding box for each line of text in a passage."""
        if passage.span == NO_SPAN:
            return [passage.box] if passage.box else []
        lines: list[Box] = []
        for word in self.words:
            if word.box and _overlap(word.span, passage.span):
                x0, y0, x1, y1 = word.box
                if lines and lines[-1][1] <= (y0 + y1) / 2 <= lines[-1][3]:
                    left, top, right, bottom = lines.pop()
                    x0, y0, x1, y1 = min(left, x0), min(top, y0), max(right, x1), max(bottom, y1)
                lines.append((x0, y0, x1, y1))
        return lines

    def focus(self, query_token: int | None = None) -> Word | Passage:
        """Returns the best passage that has a location or, for a query token, the best word."""
        located = [p for p in self.passages if p.box or p.times] if query_token is None else []
        return located[0] if located else self.best_word(query_token)


def visible_time(location: Word | Passage) -> float | None:
    """Returns a visible time: the middle for text (times are estimates), or a region's frame."""
    if location.times is None:
        return None
    is_text = location.text if isinstance(location, Word) else location.highlights
    return sum(location.times) / 2 if is_text else location.times[0]


def similarity_map(
    searcher: Searcher,
    query: AnyQuery | Queries,
    item_id: str,
    representation: str | None = None,
    *,
    by_token: bool = True,
) -> SimilarityMap:
    """Computes the similarity map of an item for a query.

    Args:
        query: A text, an image, both, or token vectors; or one query encoded by
            `Searcher.queries`.
        representation: Name of the representation, or `NAME@K` for a prefix. Defaults to `full` if
            it exists, otherwise the first.
        by_token: Whether to compare the words of merged vectors by their own vectors, if the index
            has them. The score, `credit` and `contribution` are those of the representation.

    Raises:
        SpecError: The item does not exist, or the index lacks its token positions, its vectors or
            the assignment of its tokens to compressed vectors.
    """
    info = searcher.representation(representation)
    given = query if isinstance(query, Queries) else [query]
    queries = searcher.queries(given, info.name)
    item = read_stored_item(searcher.index, item_id, info)
    stored_ND = item.vectors(searcher.index)
    output_T = item.assigned_vectors(stored_ND)
    vectors_ND = torch.from_numpy(stored_ND[: info.max_vectors])
    sim_MN = (queries.tokens[0] @ vectors_ND.T).numpy()
    evidence, evidence_MN, evidence_T = info.name, sim_MN, output_T
    uncompressed = token_representation(searcher.index, info) if by_token else None
    tokens_TD = token_vectors(searcher.index, uncompressed, [item_id]).get(item_id)
    if uncompressed is not None and tokens_TD is not None and len(tokens_TD) == len(output_T):
        evidence, evidence_T = uncompressed.name, np.arange(len(output_T))
        evidence_MN = (queries.tokens[0] @ torch.from_numpy(tokens_TD).T).numpy()
    text = item.value(info.text_column)
    spans_T2, extents_T6, confidence_T = item.positions()
    tokens, positions = queries.token_texts[0], (spans_T2, extents_T6, text)
    passages = find_passages(tokens, evidence_MN, evidence_T, *positions, confidence_T)
    contribution_M = contributions(sim_MN)
    words = _words(
        text or "",
        spans_T2,
        extents_T6,
        output_T,
        sim_MT=np.where(evidence_T < 0, np.nan, evidence_MN[:, evidence_T]),
        credit_T=_shares(sim_MN, sim_MN.max(axis=1), output_T),
        contribution_T=_shares(sim_MN, contribution_M, output_T),
        highlight_T=_shares(evidence_MN, contributions(evidence_MN), evidence_T),
    )
    maximum, is_shared = float(contributions(evidence_MN).max()), evidence == info.name
    return SimilarityMap(
        query_tokens=tuple(tokens),
        words=_highlighted(words, passages, maximum, is_shared=is_shared),
        evidence=evidence,
        item_id=item_id,
        representation=info.name,
        score=float(sim_MN.max(axis=1).sum()),
        contributions=tuple(contribution_M.tolist()),
        passages=passages,
    )


def _shares(sim_MN: np.ndarray, values_M: np.ndarray, output_T: np.ndarray) -> np.ndarray:
    """Adds values of query tokens to their best vectors. Returns the sum of each input token (T,).

    Input tokens without a vector have 0.
    """
    sum_N = np.bincount(sim_MN.argmax(axis=1), values_M, sim_MN.shape[1])
    return np.where(output_T < 0, 0.0, sum_N[output_T])


def _highlighted(
    words: Sequence[Word], passages: Sequence[Passage], maximum: float, *, is_shared: bool
) -> tuple[Word, ...]:
    """Returns the words with their highlights.

    The highlight of a word is its contribution, which words of a vector share, or its contribution
    to the gain of a passage, whichever is higher, at most the highest contribution of a query
    token: a name of many tokens would otherwise dominate the map.

    Args:
        words: Words whose highlights are the contributions.
        is_shared: Whether words are compared by the vectors that represent them.
    """
    highlights = [word for passage in passages for word in passage.highlights]
    num_words = Counter(word.vector for word in words) if is_shared else Counter()
    return tuple(
        word.model_copy(
            update={
                "highlight": min(
                    max(
                        word.highlight / max(num_words[word.vector], 1),
                        sum(h.contribution for h in highlights if _overlap(h.span, word.span)),
                    ),
                    maximum,
                )
            }
        )
        for word in words
    )


def _overlap(one: Sequence[int], other: Sequence[int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _words(
    text: str,
    spans_T2: np.ndarray,
    extents_T6: np.ndarray,
    output_T: np.ndarray,
    *,
    sim_MT: np.ndarray,
    credit_T: np.ndarray,
    contribution_T: np.ndarray,
    highlight_T: np.ndarray,
) -> list[Word]:
    """Groups neighbouring tokens into words by location or, without locations, by adjacency."""
    has_location_T = ~np.isnan(extents_T6).all(axis=1)
    moves_T = (np.nan_to_num(np.diff(extents_T6, axis=0)) != 0).any(axis=1)
    moves_T |= np.isnan(extents_T6[1:]).sum(axis=1) != np.isnan(extents_T6[:-1]).sum(axis=1)
    touches_T = spans_T2[1:, 0] == spans_T2[:-1, 1]
    starts = np.flatnonzero(np.r_[True, np.where(has_location_T[1:], moves_T, ~touches_T)])
    words = []
    for start, stop in zip(starts, [*starts[1:], len(spans_T2)], strict=True):
        # Image patches have a location but no text. Words may have text but no location.
        if not has_location_T[start] and (has_location_T.any() or spans_T2[start, 0] < 0):
            continue
        sim_MS = sim_MT[:, start:stop]
        has_vector = ~np.isnan(sim_MS).all(axis=0)
        if has_vector.any():
            similarities = sim_MS[:, has_vector].max(axis=1)
        else:
            similarities = np.full(len(sim_MS), np.nan)
        first, last = int(spans_T2[start, 0]), int(spans_T2[stop - 1, 1])
        location = token_location((first, last), extents_T6[start].tolist())
        vector = int(output_T[start])
        word = Word(
            text=text[first:last] if first >= 0 else "",
            span=(first, last),
            box=location.box if location else None,
            times=location.times if location else None,
            similarities=tuple(None if np.isnan(s) else s for s in similarities.tolist()),
            credit=float(credit_T[start:stop].max()),
            highlight=float(highlight_T[start:stop].max()),
            contribution=float(contribution_T[start:stop].max()),
            vector=None if vector < 0 else vector,
        )
        words.append(word)
    return words
