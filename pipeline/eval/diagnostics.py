"""Diagnostics of compressed indexes: score retention, vector usage and token similarity.

The metrics are defined in the papers. They are computed from the best matches between query tokens
and stored vectors. A *match record* consists of a query token, the best-matching vector of a
relevant item, and their similarity. A *position* is an index into the sequence of the stored
vectors of an item or of the tokens of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pipeline.search.maxsim import best_tokens
from pipeline.search.packed import PackedVectors
from pipeline.tokens import normalise

#: Number of query tokens per scoring call, the same as for ranking short queries.
TOKENS_PER_BATCH = 1280
#: Maximum number of rows of a similarity map; in longer items, adjacent positions share a row.
MAX_ROWS = 64
#: Maximum number of bars of a strength profile.
MAX_BARS = 256
#: Maximum number of items to average similarities over. Larger indexes are sampled.
MAX_ITEMS = 1000

#: Scores of a relevant pair: compressed, and uncompressed.
Scores = Sequence[float]


class Retention(NamedTuple):
    """Oracle Score Retention, averaged in the two ways that are in use.

    Attributes:
        mean: Mean of the ratios of the pairs, as the paper defines it.
        ratio_of_means: Mean score divided by mean uncompressed score, as in the paper's tables.
        num_left_out: Number of pairs left out because a negative uncompressed score has no
            meaningful ratio.
    """

    mean: float
    ratio_of_means: float
    num_pairs: int
    num_left_out: int


def score_retention(pairs: Sequence[Scores]) -> Retention | None:
    """Computes Oracle Score Retention over pairs of a query and a relevant item (SAP, equation 8).

        R = sum_i max_{v in pruned} <q_i, v>  /  sum_i max_{v in full} <q_i, v>

    A pair with an uncompressed score of 0 has lost nothing: its ratio is 1.

    Args:
        pairs: (score, uncompressed score) of each pair.

    Returns:
        None if no pair has an uncompressed score of at least 0.

    >>> score_retention([(1.0, 2.0), (3.0, 3.0), (0.0, 0.0), (1.0, -1.0)])
    Retention(mean=0.8333333333333334, ratio_of_means=0.8, num_pairs=3, num_left_out=1)
    """
    pairs_P2 = np.asarray(pairs, np.float64).reshape(-1, 2)
    valid_P2 = pairs_P2[pairs_P2[:, 1] >= 0]
    if not len(valid_P2):
        return None
    score_P, full_P = valid_P2.T
    ratio_P = np.divide(score_P, full_P, out=np.ones_like(full_P), where=full_P > 0)
    ratio = score_P.sum() / full_P.sum() if full_P.any() else 1.0
    num_pairs = len(valid_P2)
    return Retention(float(ratio_P.mean()), float(ratio), num_pairs, len(pairs_P2) - num_pairs)


def used_vectors(
    queries: Sequence[torch.Tensor], packed: PackedVectors, rows: np.ndarray
) -> np.ndarray:
    """Marks the stored vectors of an item that are the best match of at least one query token.

    Returns (T,) bool. All pairs of a query and an item are considered. In contrast, AGC (section
    6.5) counts the vectors that are "active during a single evaluation pass" and only considers
    relevant pairs. These vectors are available as the `vectors` of `Matches`.
    """
    used_T = np.zeros(packed.num_vectors, bool)
    tokens_MD = torch.cat(list(queries))
    documents = torch.from_numpy(rows)
    starts_B = packed.starts[documents].unsqueeze(1)
    for part_MD in tokens_MD.split(TOKENS_PER_BATCH):
        for first, _, token_bM in best_tokens(part_MD, packed, rows=documents):
            vector_bM = (token_bM + starts_B[first : first + len(token_bM)])[token_bM[:, 0] >= 0]
            used_T[vector_bM.numpy()] = True
    return used_T


class Matches(NamedTuple):
    """Match records of relevant pairs, concatenated over P pairs to R records.

    Attributes:
        scores: MaxSim score of each pair (P,).
        document: Position of the best-matching vector (R,).
        query: Position of the query token (R,).
        similarity: Similarity of the match (R,).
        vectors: Index of the matched vector among all stored vectors (R,).
    """

    scores: np.ndarray
    document: np.ndarray
    query: np.ndarray
    similarity: np.ndarray
    vectors: np.ndarray


def match_pairs(
    queries: Sequence[torch.Tensor], packed: PackedVectors, rows: Sequence[np.ndarray]
) -> Matches:
    """Returns the match records of queries (M, D) and the items at their ascending rows (P,)."""
    parts = []
    for query_MD, rows_P in zip(queries, rows, strict=True):
        documents = torch.from_numpy(rows_P)
        for first, sim_bM, token_bM in best_tokens(query_MD, packed, rows=documents):
            starts = packed.starts[documents[first : first + len(sim_bM)]].unsqueeze(1)
            parts.append(
                (
                    sim_bM.double().sum(dim=1).numpy(),
                    token_bM.flatten().numpy(),
                    np.tile(np.arange(len(query_MD)), len(sim_bM)),
                    sim_bM.double().flatten().numpy(),
                    (token_bM + starts).flatten().numpy(),
                )
            )
    empty = (np.empty(0), *([np.empty(0, np.int64)] * 2), np.empty(0), np.empty(0, np.int64))
    return Matches(*(np.concatenate(column) for column in zip(empty, *parts, strict=True)))


def matching_strength(matches: Matches, num_positions: int) -> np.ndarray:
    """Computes how strongly query positions match document positions (AGC, section 6.5).

        S[p, i] = (sum of the maximum similarities of the records at (p, i)) / (records at i)

    The mean over query positions is the profile in Figure 3 of the paper.

    Returns:
        (document positions, query positions) float64, with one column per query position up to the
        last that has a record.
    """
    num_queries = int(matches.query.max()) + 1 if len(matches.query) else 0
    strength = np.zeros((num_positions, num_queries))
    np.add.at(strength, (matches.document, matches.query), matches.similarity)
    return strength / np.bincount(matches.query, minlength=num_queries)


def coefficient_of_variation(strengths: np.ndarray) -> float | None:
    """Computes the coefficient of variation sigma / mu x 100 of matching strengths (AGC, 6.5).

    Lower values indicate more even matching. The standard deviation is that of the population
    (division by n). Strengths are sums of similarities and may therefore be negative. As neither CV
    nor Gini is defined for negative values, they are replaced by 0.

    Returns:
        None if no strength is positive.

    >>> coefficient_of_variation(np.array([[1.0, 3.0], [-5.0, 4.0]]))
    79.05694150420949
    """
    strengths = np.clip(strengths, 0, None)
    mean = strengths.mean() if strengths.size else 0.0
    return float(100 * strengths.std() / mean) if mean > 0 else None


def gini(strengths: np.ndarray) -> float | None:
    """Computes the Gini coefficient of matching strengths (AGC, section 6.5), from 0 (even) to 1.

        G = 2 (sum over i of i x_i) / (n (sum of x_i)) - (n + 1) / n,  x ascending, i from 1

    The paper prints the numerator as a sum of squared x_i, which would depend on the unit of x.
    This is the standard formula. Negative strengths count as 0.

    Returns:
        None if no strength is positive.

    >>> gini(np.array([1.0, 1.0, 1.0])), gini(np.array([0.0, 0.0, 0.0, 2.0, -1.0]))
    (0.0, 0.8)
    """
    ascending = np.sort(np.clip(strengths, 0, None), axis=None)
    total, size = ascending.sum(), ascending.size
    if not total > 0:
        return None
    ranks = np.arange(1, size + 1)
    return float(2 * (ranks * ascending).sum() / (size * total) - (size + 1) / size)


class TokenSimilarity(NamedTuple):
    """Similarity between the vectors of an item, averaged over items.

    Attributes:
        map: Mean cosine between positions (rows, rows), including each vector with itself. In items
            longer than `MAX_ROWS`, a row is a run of adjacent positions.
        mean: Mean over all pairs of different vectors of an item, averaged over items, or None
            without such pairs.
    """

    map: np.ndarray
    mean: float | None
    num_items: int


def inter_token_similarity(
    packed: PackedVectors, rows: np.ndarray, max_items: int = MAX_ITEMS, seed: int = 0
) -> TokenSimilarity:
    """Averages the cosines between the vectors of an item over items, by position (AGC, 6.5).

    The sum over all pairs of two runs of positions is the dot product of the sums of both runs. The
    required memory is therefore independent of the length of the items. Of more than `max_items`
    items, a random sample is used.
    """
    rows = rows[packed.lengths[rows].numpy() > 0]
    if len(rows) > max_items:
        rows = np.sort(np.random.default_rng(seed).choice(rows, max_items, replace=False))
    longest = int(packed.lengths[rows].max()) if len(rows) else 0
    num_rows = min(longest, MAX_ROWS)
    sums, counts = np.zeros((num_rows, num_rows)), np.zeros((num_rows, num_rows))
    means = []
    for row in rows.tolist():
        vectors_ND = normalise(packed.item(row))
        num_vectors = len(vectors_ND)
        bin_N = np.arange(num_vectors) * num_rows // longest
        first_N, size = np.searchsorted(bin_N, bin_N), np.bincount(bin_N).max()
        # `index_add_` adds in the same order, but its threads wait for each other.
        padded_RSD = np.zeros((num_rows, size, vectors_ND.shape[1]), np.float32)
        padded_RSD[bin_N, np.arange(num_vectors) - first_N] = vectors_ND.numpy()
        sums_RD = torch.from_numpy(padded_RSD.sum(axis=1))
        sums += (sums_RD @ sums_RD.T).numpy()
        count_R = np.bincount(bin_N, minlength=num_rows)
        counts += np.outer(count_R, count_R)
        if num_vectors > 1:
            all_pairs = float(vectors_ND.sum(dim=0).square().sum())
            diagonal = float(vectors_ND.square().sum())
            means.append((all_pairs - diagonal) / (num_vectors * (num_vectors - 1)))
    mean = float(np.mean(means)) if means else None
    return TokenSimilarity(sums / np.maximum(counts, 1), mean, len(rows))


def strength_profile(strength: np.ndarray, max_bars: int = MAX_BARS) -> list[float]:
    """Averages the strengths of each position, or of runs of neighbouring positions.

    >>> strength_profile(np.array([[1.0, 3.0], [0.0, 0.0], [4.0, 4.0]]), max_bars=2)
    [1.0, 4.0]
    """
    strengths = strength.mean(axis=1) if strength.size else np.zeros(len(strength))
    bars = min(len(strengths), max_bars)
    bar_N = np.arange(len(strengths)) * bars // max(1, len(strengths))
    sums = np.bincount(bar_N, weights=strengths, minlength=bars)
    return (sums / np.maximum(np.bincount(bar_N, minlength=bars), 1)).tolist()


@dataclass(frozen=True)
class Diagnosis:
    """Diagnostics of one representation.

    Attributes:
        full: Uncompressed representation that retention is relative to, or empty without one.
        pairs: (score, uncompressed score) of each relevant pair, by query id, or empty without an
            uncompressed representation.
        num_missing: Number of relevant pairs left out because the item has no vectors in this
            representation.
        used: Fraction of the stored vectors that are the best match of any query token, over all
            pairs of a query and an item.
        used_relevant: The same fraction over relevant pairs and the vectors of their items, as in
            AGC.
        cv: Coefficient of variation of the matching strengths, or None if nothing matches.
        gini: Gini coefficient of the matching strengths, or None if nothing matches.
        num_positions: Length of the longest item among the relevant pairs.
        strengths: Matching strength of each position. Adjacent positions are averaged beyond
            `MAX_BARS`.
        similarity_mean: Mean similarity of two vectors of an item.
        num_sampled: Number of items that the similarities are averaged over.
    """

    full: str
    pairs: dict[str, list[list[float]]]
    num_missing: int
    used: float | None
    used_relevant: float | None
    cv: float | None
    gini: float | None
    num_positions: int
    strengths: list[float]
    similarity: list[list[float]]
    similarity_mean: float | None
    num_sampled: int

    def retention(self, query_ids: Sequence[str] | None = None) -> Retention | None:
        """Computes the score retention over all queries or over a subset of them."""
        wanted = self.pairs if query_ids is None else query_ids
        return score_retention([pair for q in wanted for pair in self.pairs.get(q, ())])


def mean_diagnosis(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Averages the diagnoses of several seeds of a method.

    Retention is linear in the score of a pair, so the mean of the scores has the mean retention.
    """
    first, *others = diagnoses

    def mean(name: str) -> float | None:
        values = [value for d in diagnoses if (value := getattr(d, name)) is not None]
        return float(np.mean(values)) if values else None

    def mean_list(name: str) -> list:
        """Averages the lists that are as long as the first one."""
        lists = [getattr(d, name) for d in diagnoses]
        lists = [values for values in lists if len(values) == len(lists[0])]
        return np.mean(lists, axis=0).tolist()

    common_ids = [
        query_id
        for query_id, pairs in first.pairs.items()
        if all(len(other.pairs.get(query_id, ())) == len(pairs) for other in others)
    ]
    return Diagnosis(
        full=first.full,
        pairs={
            query_id: np.mean([d.pairs[query_id] for d in diagnoses], axis=0).tolist()
            for query_id in common_ids
        },
        num_missing=max(d.num_missing for d in diagnoses),
        **{name: mean(name) for name in ("used", "used_relevant", "cv", "gini")},
        num_positions=first.num_positions,
        strengths=mean_list("strengths"),
        similarity=mean_list("similarity"),
        similarity_mean=mean("similarity_mean"),
        num_sampled=first.num_sampled,
    )
