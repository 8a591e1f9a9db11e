"""Validation of recommendations: regret against the best candidate of the complete sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

from pipeline.eval.recommend.choose import Row, Target, choose
from pipeline.eval.recommend.comparison import Comparison
from pipeline.eval.significance import ratio_intervals


class Regret(NamedTuple):
    """Regret of a recommendation, measured on judged queries that it has not used.

    Attributes:
        estimate: "pseudo-queries" or "half of the queries".
        recommended: Name of the recommended candidate.
        best: Name of the smallest candidate that meets the requirements on the judged queries.
        retained: Retained quality of the recommended candidate on the judged queries.
        shortfall: Required minus retained quality, or 0 if the requirement is met.
        size_ratio: Bytes per item of the recommended candidate relative to the best one.
        correlation: Spearman correlation of the estimated and the measured quality over all
            candidates. NaN if either is constant.
        coverage: Fraction of the candidates whose interval contains the measured quality.
    """

    estimate: str
    recommended: str
    best: str
    retained: float
    shortfall: float
    size_ratio: float
    correlation: float
    coverage: float


def regrets(judged: Comparison, pseudo: Comparison, target: Target) -> list[Regret]:
    """Measures the regret of recommendations without queries and with half of the queries.

    Halves consist of every other query. Each half is used once to recommend and once to measure.
    """
    num_queries = len(judged.reference_Q)
    found = [_regret("pseudo-queries", pseudo.rows, judged.rows, target)]
    for first in (0, 1) if num_queries > 1 else ():
        used = np.arange(num_queries) % 2 == first
        if judged.reference_Q[used].any() and judged.reference_Q[~used].any():
            estimated, measured = _restricted(judged, used), _restricted(judged, ~used)
            found.append(_regret("half of the queries", estimated, measured, target))
    return found


def _restricted(comparison: Comparison, used: np.ndarray) -> list[Row]:
    reference_Q, values_RQ = comparison.reference_Q[used], np.stack(comparison.values)[:, used]
    intervals = ratio_intervals(values_RQ, reference_Q).tolist()
    return [
        dataclasses.replace(
            row,
            quality=quality,
            retained=quality / float(reference_Q.mean()),
            low=low,
            high=high,
        )
        for row, quality, (low, high) in zip(
            comparison.rows, values_RQ.mean(axis=1).tolist(), intervals, strict=True
        )
    ]


def _regret(
    estimate: str, estimated: Sequence[Row], measured: Sequence[Row], target: Target
) -> Regret:
    """Compares the choice by estimated quality with the one by measured quality."""
    best = choose([dataclasses.replace(row, low=row.retained) for row in measured], target).row
    name = choose(estimated, target).row.name
    recommended = next(row for row in measured if row.name == name)
    values = [row.retained for row in estimated], [row.retained for row in measured]
    is_constant = any(len(set(column)) < 2 for column in values)
    correlation = float("nan") if is_constant else float(scipy.stats.spearmanr(*values).statistic)
    is_covered = [
        row.low <= truth.retained <= row.high
        for row, truth in zip(estimated, measured, strict=True)
    ]
    return Regret(
        estimate=estimate,
        recommended=name,
        best=best.name,
        retained=recommended.retained,
        shortfall=max(0.0, target.retain - recommended.retained),
        size_ratio=recommended.bytes_per_item / best.bytes_per_item,
        correlation=correlation,
        coverage=float(np.mean(is_covered)),
    )
