"""Early termination of exact scoring for the benchmark of candidate generators.

Two rules end the scoring of candidates, which are taken in descending order of their approximate
scores:

- alpha: Candidates are dropped whose approximate score is below alpha times the k-th approximate
  score.
- beta: Scoring ends after beta candidates that did not change the k best items.

They are simulated from the scores of all candidates. Both are compared to scoring a fixed number of
candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.bench.harness import seconds_of

#: Number of items that are searched for.
K = 10
ALPHAS, BETAS = (0.99, 0.98, 0.96, 0.94, 0.9), (50, 100, 200, 400, 800)
FIXED = (50, 100, 200, 400, 800, 1600, 3200)
#: Number of candidates, and of candidates that are scored before a rule can end the scoring.
MAX_CANDIDATES, BLOCK = 6400, 128
HEADER = ["generator", "rule", "scored", "recall@10", "ms"]


def measure(
    searcher: Any, column: str, queries: Sequence[Any], name: str
) -> Iterator[tuple[list[Any], dict[str, float]]]:
    """Simulates the rules and measures the time of exact scoring, without that of the generator.

    Yields:
        The cells of a row of the table, and its numbers.
    """
    import torch

    from pipeline.search.candidates import generator_columns
    from pipeline.search.maxsim import maxsim

    packed, scorer = searcher.packed(column), searcher.scorer
    codes_column = generator_columns(searcher.index, searcher.representation(column), name)[name]
    generator, codes = searcher.index.generator(codes_column), scorer.packed(codes_column)
    tokens = searcher.queries(queries, column).tokens
    transform = generator.codec.transform_queries
    approximate_QB = maxsim([transform(t) for t in generator.queries(tokens)], codes).numpy()
    exact_QB = maxsim(tokens, packed).numpy()
    order_QC = np.argsort(-approximate_QB, axis=1, kind="stable")[:, :MAX_CANDIDATES]
    best_QK = np.argsort(-exact_QB, axis=1, kind="stable")[:, :K]

    def seconds(query: int, num_scored: int, block: int) -> float:
        blocks = [
            torch.from_numpy(np.sort(order_QC[query, first : min(first + block, num_scored)]))
            for first in range(0, num_scored, block)
        ]
        query_tokens = [tokens[query]]
        return seconds_of(lambda: [maxsim(query_tokens, packed, rows=rows) for rows in blocks])

    def row(
        rule: str, nums_scored: Sequence[int], block: int
    ) -> tuple[list[Any], dict[str, float]]:
        found = [
            len(set(order[:number]) & set(best)) / K
            for order, best, number in zip(order_QC, best_QK, nums_scored, strict=True)
        ]
        seconds(0, nums_scored[0], block)  # warm-up
        ms = [1000 * seconds(q, number, block) for q, number in enumerate(nums_scored)]
        figures = {
            "scored": float(np.mean(nums_scored)),
            "recall@10": float(np.mean(found)),
            "ms": float(np.mean(ms)),
        }
        cells = [f"{figures['scored']:,.0f}", f"{figures['recall@10']:.3f}", f"{figures['ms']:.3f}"]
        return [name, rule, *cells], figures

    for number in FIXED:
        yield row(f"fixed {number}", [number] * len(order_QC), number)
    approximate_QC = np.take_along_axis(approximate_QB, order_QC, axis=1)
    exact_QC = np.take_along_axis(exact_QB, order_QC, axis=1)
    for alpha in ALPHAS:
        nums = [num_above(scores, alpha) for scores in approximate_QC]
        yield row(f"alpha {alpha}", nums, MAX_CANDIDATES)
    for beta in BETAS:
        yield row(f"beta {beta}", [num_before_stop(scores, beta) for scores in exact_QC], BLOCK)


def num_above(approximate_C: np.ndarray, alpha: float, k: int = K) -> int:
    """Returns the number of candidates whose score is at least alpha times the k-th.

    Args:
        approximate_C: Descending approximate scores of the candidates.
        alpha: Factor from 0 to 1.
        k: Number of items that are searched for.

    >>> num_above(np.array([10.0, 8.0, 7.0, 6.0]), 0.8, k=2)
    3
    """
    return int((approximate_C >= alpha * approximate_C[k - 1]).sum())


def num_before_stop(exact_C: np.ndarray, beta: int, k: int = K, block: int = BLOCK) -> int:
    """Returns the number of candidates that are scored, in whole blocks.

    Args:
        exact_C: Exact scores of the candidates in descending order of their approximate scores.
        beta: Number of candidates without improvement after which the scoring ends.
        k: Number of items that are searched for.
        block: Number of candidates that are scored together.

    >>> num_before_stop(np.array([9.0, 7.0, 8.0, 1.0, 2.0, 0.0, 9.0]), beta=2, k=2, block=1)
    5
    >>> num_before_stop(np.array([9.0, 7.0, 8.0, 1.0, 2.0, 0.0, 9.0]), beta=4, k=2, block=2)
    7
    """
    best = np.full(k, -np.inf)
    last_improvement = 0
    for first in range(0, len(exact_C), block):
        scored = min(first + block, len(exact_C))
        merged = np.sort(np.concatenate([best, exact_C[first:scored]]))[-k:]
        if not np.array_equal(merged, best):
            last_improvement = scored
        elif scored - last_improvement >= beta:
            return scored
        best = merged
    return len(exact_C)
