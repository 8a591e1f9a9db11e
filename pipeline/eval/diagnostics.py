"""Why a compressed index ranks as it does: score retention, use of the vectors, their likeness.

The papers' own diagnostics, from the best matches between judged queries and stored vectors. A
*match record* is one token of a query, the vector of a relevant item that it matches best, and how
similar both are. A *position* is a place in an item's sequence of stored vectors, or in a query's
sequence of tokens.
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

#: Query tokens scored at once, as many as ranking takes of short queries.
TOKENS_AT_ONCE = 1280
#: Rows of a similarity map at most: neighbouring positions of longer items share a row.
MAX_ROWS = 64
#: Bars of a strength profile at most.
MAX_BARS = 256
#: Items that similarities are averaged over at most: a seeded sample of larger indexes.
MAX_ITEMS = 1000

#: The scores of a relevant pair: with the representation, and with the full tokens.
Scores = Sequence[float]


class Retention(NamedTuple):
    """Oracle Score Retention, as both averages in use.

    Attributes:
        mean: of the pairs' ratios, as the paper defines it.
        ratio_of_means: mean score over mean full score, as its tables were computed.
        num_pairs: what both are averages over.
        num_left_out: pairs whose full score is negative: no ratio means anything there.
    """

    mean: float
    ratio_of_means: float
    num_pairs: int
    num_left_out: int


def score_retention(pairs: Sequence[Scores]) -> Retention | None:
    """Oracle Score Retention over pairs of a query and a relevant item (SAP, equation 8).

        R = sum_i max_{v in pruned} <q_i, v>  /  sum_i max_{v in full} <q_i, v>

    A pair whose full score is 0 has lost nothing: its ratio is 1.

    Args:
        pairs: (score, full score) of each pair.

    Returns:
        None if no pair has a full score of at least 0.

    >>> score_retention([(1.0, 2.0), (3.0, 3.0), (0.0, 0.0), (1.0, -1.0)])
    Retention(mean=0.8333333333333334, ratio_of_means=0.8, num_pairs=3, num_left_out=1)
    """
    pairs_P2 = np.asarray(pairs, np.float64).reshape(-1, 2)
    kept_P2 = pairs_P2[pairs_P2[:, 1] >= 0]
    if not len(kept_P2):
        return None
    score_P, full_P = kept_P2.T
    ratio_P = np.divide(score_P, full_P, out=np.ones_like(full_P), where=full_P > 0)
    ratio = score_P.sum() / full_P.sum() if full_P.any() else 1.0
    num_kept = len(kept_P2)
    return Retention(float(ratio_P.mean()), float(ratio), num_kept, len(pairs_P2) - num_kept)


def used_vectors(
    queries: Sequence[torch.Tensor], packed: PackedVectors, rows: np.ndarray
) -> np.ndarray:
    """Marks the stored vectors that are the best match of any query token in their item.

    All pairs of a query and an item count. AGC (section 6.5) instead counts vectors that are
    "active during a single evaluation pass" from the records of relevant pairs only; these are the
    `vectors` of `Matches`.

    Args:
        queries: Token vectors (M, D) of each query.
        packed: Stored vectors of the items.
        rows: Rows of the items that take part, ascending (B,).

    Returns:
        (T,) bool, one value per stored vector.
    """
    used_T = np.zeros(packed.num_vectors, bool)
    tokens_MD = torch.cat(list(queries))
    documents = torch.from_numpy(rows)
    starts_B = packed.starts[documents].unsqueeze(1)
    for part_MD in tokens_MD.split(TOKENS_AT_ONCE):
        for first, _, token_bM in best_tokens(part_MD, packed, rows=documents):
            place_bM = (token_bM + starts_B[first : first + len(token_bM)])[token_bM[:, 0] >= 0]
            used_T[place_bM.numpy()] = True
    return used_T


class Matches(NamedTuple):
    """The match records of relevant pairs, pair after pair.

    Attributes:
        scores: (P,) the late score of each pair.
        document: (R,) positions of the vectors that match best.
        query: (R,) positions of the query tokens.
        similarity: (R,)
        vectors: (R,) the matched vectors' places among all that are stored.
    """

    scores: np.ndarray
    document: np.ndarray
    query: np.ndarray
    similarity: np.ndarray
    vectors: np.ndarray


def match_pairs(
    queries: Sequence[torch.Tensor], packed: PackedVectors, rows: Sequence[np.ndarray]
) -> Matches:
    """Returns the match records of each query with some items.

    Args:
        queries: Token vectors (M, D) of each query.
        packed: Stored vectors of the items.
        rows: For each query the rows of items that have vectors, ascending (P,).
    """
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
    nothing = (np.empty(0), *([np.empty(0, np.int64)] * 2), np.empty(0), np.empty(0, np.int64))
    return Matches(*(np.concatenate(column) for column in zip(nothing, *parts, strict=True)))


def matching_strength(matches: Matches, num_positions: int) -> np.ndarray:
    """Computes how strongly query positions match document positions (AGC, section 6.5).

        S[p, i] = (sum of the maximum similarities of the records at (p, i)) / (records at i)

    The mean over query positions is the profile that the paper's Figure 3 draws.

    Args:
        matches: Match records of the pairs.
        num_positions: Number of vectors of the longest item among the pairs.

    Returns:
        (document positions, query positions) float64; the columns are those with a record.
    """
    num_queries = int(matches.query.max()) + 1 if len(matches.query) else 0
    strength = np.zeros((num_positions, num_queries))
    np.add.at(strength, (matches.document, matches.query), matches.similarity)
    return strength / np.bincount(matches.query, minlength=num_queries)


def coefficient_of_variation(strengths: np.ndarray) -> float | None:
    """CV = sigma / mu x 100 of matching strengths (AGC, section 6.5): lower is more even.

    The standard deviation is that of the whole (divided by n). Strengths are sums of similarities
    and can be negative, where neither measure of evenness is defined: they count as 0.

    Returns:
        None if no strength is positive.

    >>> coefficient_of_variation(np.array([[1.0, 3.0], [-5.0, 4.0]]))
    79.05694150420949
    """
    strengths = np.clip(strengths, 0, None)
    mean = strengths.mean() if strengths.size else 0.0
    return float(100 * strengths.std() / mean) if mean > 0 else None


def gini(strengths: np.ndarray) -> float | None:
    """The Gini coefficient of matching strengths (AGC, section 6.5): 0 is even, 1 is one for all.

        G = 2 (sum over i of i x_i) / (n (sum of x_i)) - (n + 1) / n,  x ascending, i from 1

    The paper prints the numerator as a sum of x_i squared, which depends on the unit of x; the
    standard formula, which it is but for that, is meant. Negative strengths count as 0.

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


class Likeness(NamedTuple):
    """How similar the vectors of an item are to each other, mean over items.

    Attributes:
        map: (rows, rows) mean cosine between positions; of items longer than `MAX_ROWS` between
            runs of neighbouring positions, pairs of a vector with itself counted.
        mean: over all pairs of two vectors of an item, mean over items; None without such pairs.
        num_items: how many items were looked at.
    """

    map: np.ndarray
    mean: float | None
    num_items: int


def inter_token_similarity(
    packed: PackedVectors, rows: np.ndarray, max_items: int = MAX_ITEMS, seed: int = 0
) -> Likeness:
    """Averages the cosines between the vectors of an item over items, by position (AGC, 6.5).

    A sum over pairs of two runs of positions is the product of the runs' sums, so the memory is
    that of one item, however long it is.

    Args:
        packed: Stored vectors of the items.
        rows: Rows of the items that take part; those without vectors are ignored.
        max_items: Maximum number of items; of more items a random sample is used.
        seed: Seed of the sample.
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
        bin_N = torch.arange(num_vectors) * num_rows // longest
        sums_RD = torch.zeros(num_rows, vectors_ND.shape[1]).index_add_(0, bin_N, vectors_ND)
        sums += (sums_RD @ sums_RD.T).numpy()
        count_R = np.bincount(bin_N.numpy(), minlength=num_rows)
        counts += np.outer(count_R, count_R)
        if num_vectors > 1:
            whole = float(vectors_ND.sum(dim=0).square().sum())
            own = float(vectors_ND.square().sum())
            means.append((whole - own) / (num_vectors * (num_vectors - 1)))
    mean = float(np.mean(means)) if means else None
    return Likeness(sums / np.maximum(counts, 1), mean, len(rows))


def profile(strength: np.ndarray, max_bars: int = MAX_BARS) -> list[float]:
    """The mean over query positions of each position's strength, and of neighbours if many.

    >>> profile(np.array([[1.0, 3.0], [0.0, 0.0], [4.0, 4.0]]), max_bars=2)
    [1.0, 4.0]
    """
    strengths = strength.mean(axis=1) if strength.size else np.zeros(len(strength))
    bars = min(len(strengths), max_bars)
    place = np.arange(len(strengths)) * bars // max(1, len(strengths))
    sums = np.bincount(place, weights=strengths, minlength=bars)
    return (sums / np.maximum(np.bincount(place, minlength=bars), 1)).tolist()


@dataclass(frozen=True)
class Diagnosis:
    """What the diagnostics say of one representation.

    Attributes:
        full: the representation of the full tokens that retention is of; empty: there is none.
        pairs: by query id, (score, full score) of each pair with a relevant item; without full
            tokens there are none.
        num_missing: relevant pairs left out because this representation lacks the item's vectors.
        used: share of the stored vectors that are the best match of any query token, over all pairs
            of a query and an item.
        used_relevant: the same over relevant pairs, of the vectors of their items (AGC's).
        cv: coefficient of variation of the matching strengths; None if nothing matches.
        gini: their Gini coefficient.
        num_positions: the length of the longest item among the relevant pairs.
        strengths: the matching strength of each position, of neighbouring ones together if there
            are more than `MAX_BARS`.
        similarity: the similarity map between positions.
        similarity_mean: the mean similarity of two vectors of an item.
        num_sampled: how many items the similarities are of.
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
        """The score retention, of all queries or of some."""
        wanted = self.pairs if query_ids is None else query_ids
        return score_retention([pair for q in wanted for pair in self.pairs.get(q, ())])


def mean_diagnosis(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """The mean over the seeds of a method.

    Retention is linear in a pair's score, so the mean of the scores has the mean retention.
    """
    first, *others = diagnoses

    def mean(name: str) -> float | None:
        values = [value for d in diagnoses if (value := getattr(d, name)) is not None]
        return float(np.mean(values)) if values else None

    def mean_list(name: str) -> list:
        """Of equally many numbers; a seed that stores another number of vectors is left out."""
        lists = [getattr(d, name) for d in diagnoses]
        lists = [values for values in lists if len(values) == len(lists[0])]
        return np.mean(lists, axis=0).tolist()

    in_all = [
        query_id
        for query_id, pairs in first.pairs.items()
        if all(len(other.pairs.get(query_id, ())) == len(pairs) for other in others)
    ]
    return Diagnosis(
        full=first.full,
        pairs={
            query_id: np.mean([d.pairs[query_id] for d in diagnoses], axis=0).tolist()
            for query_id in in_all
        },
        num_missing=max(d.num_missing for d in diagnoses),
        **{name: mean(name) for name in ("used", "used_relevant", "cv", "gini")},
        num_positions=first.num_positions,
        strengths=mean_list("strengths"),
        similarity=mean_list("similarity"),
        similarity_mean=mean("similarity_mean"),
        num_sampled=first.num_sampled,
    )
