"""Significance tests: randomisation tests of differences and bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Number of random signs per block, which bounds the memory on benchmarks with many queries.
BLOCK = 1 << 22


def randomisation_p(
    differences_RQ: np.ndarray, num_permutations: int = 10_000, seed: int = 0
) -> np.ndarray:
    """Computes two-sided p values of R paired randomisation tests over the same Q queries.

    Under the null hypothesis, the difference of each query is equally likely to have the opposite
    sign. The p value is the fraction of random sign vectors for which the mean difference is at
    least as far from 0 as the observed difference. The observed difference itself is included, so
    that p = (1 + count) / (1 + num_permutations) is never 0.

    Args:
        differences_RQ: Value of one system minus that of the other for each query, (R, Q).
        num_permutations: Number of random sign vectors, shared by all comparisons.
        seed: Seed of the random signs.

    Returns:
        p values (R,) float64.

    >>> p = randomisation_p(np.array([[0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]]))
    >>> p.round(2).tolist()  # of the 16 ways to choose four signs, 2 are as extreme
    [1.0, 0.12]
    """
    differences_RQ = np.asarray(differences_RQ, np.float64)
    num_queries = differences_RQ.shape[1]
    # Tolerates rounding errors between sums that are mathematically equal.
    observed_R = np.abs(differences_RQ.sum(1)) - 1e-9 * np.abs(differences_RQ).sum(1)
    rng = np.random.default_rng(seed)
    count_R = np.zeros(len(differences_RQ), np.int64)
    rows = max(1, BLOCK // max(1, num_queries))
    for first in range(0, num_permutations, rows):
        shape = (min(rows, num_permutations - first), num_queries)
        signs_PQ = rng.integers(0, 2, shape, np.int8).astype(np.float32) * 2 - 1
        count_R += (np.abs(signs_PQ @ differences_RQ.T) >= observed_R).sum(0)
    return (1 + count_R) / (1 + num_permutations)


def holm(p_values: Sequence[float]) -> list[float]:
    """Applies Holm's correction for multiple tests to p values.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = float(largest)
    return corrected


def bootstrap_interval(
    values_N: np.ndarray, share: float = 0.95, num_samples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Computes a bootstrap confidence interval of a mean by the percentile method.

    Args:
        values_N: Independent values (N,). Dependent queries must be averaged to one value.
        share: Confidence level of the interval, in (0, 1).
        num_samples: Number of bootstrap samples of N values, drawn with replacement.
        seed: Seed of the samples.

    >>> bootstrap_interval(np.array([0.5, 0.5, 0.5]))
    (0.5, 0.5)
    >>> low, high = bootstrap_interval(np.array([0.0, 1.0] * 50))
    >>> round(low, 1), round(high, 1)
    (0.4, 0.6)
    """
    return percentile_interval(bootstrap_means(values_N, num_samples, seed), share)


def bootstrap_means(values_N: np.ndarray, num_samples: int, seed: int = 0) -> np.ndarray:
    """Returns the means (S,) of bootstrap samples of N values, drawn with replacement."""
    values_N = np.asarray(values_N, np.float64)
    shape = (num_samples, len(values_N))
    indices_SN = np.random.default_rng(seed).integers(0, len(values_N), shape)
    return values_N[indices_SN].mean(axis=1)


def percentile_interval(means_S: np.ndarray, share: float = 0.95) -> tuple[float, float]:
    """Returns the confidence interval of a statistic from its bootstrap samples."""
    tail = (1 - share) / 2
    low, high = np.quantile(means_S, [tail, 1 - tail])
    return float(low), float(high)


def ratio_intervals(
    values_RN: np.ndarray,
    reference_N: np.ndarray,
    share: float = 0.95,
    num_samples: int = 2000,
    seed: int = 0,
) -> np.ndarray:
    """Computes bootstrap confidence intervals of ratios of means by the percentile method.

    The queries are resampled jointly for all systems and the reference, because their values are
    paired. Samples in which the mean of the reference is 0 have the ratio 1.

    Args:
        values_RN: Values of R systems for the same N queries.
        reference_N: Values of the reference for these queries. Its mean must be positive.
        share: Confidence level of the intervals, in (0, 1).
        num_samples: Number of bootstrap samples.
        seed: Seed of the samples.

    Returns:
        Lower and upper bounds (R, 2).

    >>> ratio_intervals(np.array([[0.5, 1.0, 0.5]]), np.array([1.0, 2.0, 1.0])).tolist()
    [[0.5, 0.5]]
    """
    num_queries = len(reference_N)
    weights = np.full(num_queries, 1 / num_queries)
    counts_SN = np.random.default_rng(seed).multinomial(num_queries, weights, num_samples)
    reference_S1 = (counts_SN @ np.asarray(reference_N, np.float64))[:, np.newaxis]
    sums_SR = counts_SN @ np.asarray(values_RN, np.float64).T
    ratios_SR = np.divide(sums_SR, reference_S1, out=np.ones_like(sums_SR), where=reference_S1 > 0)
    tail = (1 - share) / 2
    return np.quantile(ratios_SR, [tail, 1 - tail], axis=0).T
