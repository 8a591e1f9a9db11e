"""Selection of the items with the best scores."""

from __future__ import annotations

import numpy as np

#: Number of scores from which a lower bound of the best scores is estimated.
SELECTION_SAMPLE = 16384


def top_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    order: np.ndarray,
    k: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Finds the k best scores or, with groups, the best score of each of the k best groups.

    Args:
        scores: (S,) float. Items with -inf are excluded.
        rows: (S,) indices of the scored items, or None for all items in order.
        order: (B,) rank of each item among equal scores.
        groups: (B,) group of each item, or None without grouping.

    >>> order, groups = np.arange(4), np.array([0, 0, 1, 1])
    >>> scores = np.array([3.0, 2.0, 1.0, 3.0])
    >>> top_rows(scores, None, order, 2).tolist(), top_rows(scores, None, order, 3, groups).tolist()
    ([0, 3], [0, 3])
    """
    if rows is not None:
        order = order[rows]
        groups = None if groups is None else groups[rows]
    best = scores
    if groups is not None and len(groups):
        best = np.full(groups.max() + 1, -np.inf, scores.dtype)
        np.maximum.at(best, groups, scores)
    # Sort only scores that can be among the k best.
    limit = np.partition(best, -k)[-k] if k < len(best) else -np.inf
    candidates = np.flatnonzero((scores >= limit) & (scores > -np.inf))
    candidates = candidates[np.lexsort((order[candidates], -scores[candidates]))]
    if groups is not None:
        _, first = np.unique(groups[candidates], return_index=True)
        candidates = candidates[np.sort(first)]
    return candidates[:k]


def best_rows(
    scores: np.ndarray,
    rows: np.ndarray | None,
    num: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the items with the `num` best scores in ascending order. Ties are all included.

    Args:
        scores: (S,) float. Items with -inf are excluded.
        rows: (S,) ascending indices of the scored items, or None for all items.
        groups: (B,) group of each item, or None. If given, the best item of each of the `num` best
            groups is included as well, so that candidates of few groups do not replace the others.

    >>> best_rows(np.array([3.0, 1.0, 2.0, 2.0]), None, 2).tolist()
    [0, 2, 3]
    >>> scores, groups = np.array([3.0, 2.5, 1.0, 0.5]), np.array([0, 0, 1, 1])
    >>> best_rows(scores, None, 2, groups).tolist()
    [0, 1, 2]
    """
    selected = (scores >= _limit(scores, num)) & (scores > -np.inf)
    if groups is not None and len(scores):
        groups = groups if rows is None else groups[rows]
        best = np.full(groups.max() + 1, -np.inf, scores.dtype)
        np.maximum.at(best, groups, scores)
        selected |= (scores >= max(_limit(best, num), -1e38)) & (scores == best[groups])
    chosen = np.flatnonzero(selected)
    return chosen if rows is None else rows[chosen]


def _limit(scores: np.ndarray, num: int) -> float:
    """Returns the `num`-th best score, or -inf if there are fewer.

    Scores below a bound that is estimated on a sample are left out: selecting among a million
    scores takes longer than computing them.
    """
    if num >= len(scores):
        return -np.inf
    sample = scores[:: max(len(scores) // SELECTION_SAMPLE, 1)]
    # Twice the expected number of sampled scores, plus four standard deviations.
    expected = num * len(sample) / len(scores)
    rank = int(2 * expected + 4 * expected**0.5) + 4
    if rank < len(sample) // 4:
        above = scores[scores >= np.partition(sample, -rank)[-rank]]
        scores = above if len(above) >= num else scores
    return float(np.partition(scores, -num)[-num])
