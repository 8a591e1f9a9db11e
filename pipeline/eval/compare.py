"""Comparison of two evaluations that use the same judged queries, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.config import SpecError
from pipeline.eval.results import (
    Evaluation,
    PlannedComparison,
    compare_rows,
    query_differences,
    read_results,
)
from pipeline.eval.significance import holm, randomisation_p


@dataclass(frozen=True)
class Difference:
    """Difference between two evaluations in one row and one metric.

    Attributes:
        name: Name of the row.
        measure: Name of the metric.
        a: Mean in the first evaluation.
        b: Mean in the second evaluation.
        p: p value of b - a, corrected over the rows.
    """

    name: str
    measure: str
    a: float
    b: float
    p: float

    @property
    def change(self) -> float:
        """Mean of the second evaluation minus mean of the first."""
        return self.b - self.a


@dataclass(frozen=True)
class Comparison:
    """Differences between two evaluations.

    Attributes:
        outputs: Output folders of both evaluations.
        evaluations: Both evaluations.
        differences: Differences of the common rows, by metric.
        unmatched: Names of the rows that only the first, and only the second evaluation has.
    """

    outputs: tuple[str, str]
    evaluations: tuple[Evaluation, Evaluation]
    differences: dict[str, list[Difference]]
    unmatched: tuple[list[str], list[str]]

    @property
    def headline(self) -> str:
        """Main metric, which is that of the first evaluation if both evaluations contain it."""
        return next(iter(self.differences))


def compare(output_a: str, output_b: str) -> Comparison:
    """Compares the evaluations in two output folders of `jobs.evaluate`.

    Raises:
        SpecError: An evaluation is missing, or both have no judged queries, metric or row in
            common.
    """
    a, b = _read(output_a, output_b)
    measures = [name for name in a.measures if name in b.measures]
    measures.sort(key=lambda name: name != a.headline)
    rows_a, rows_b = ({r.name: r for r in evaluation.results} for evaluation in (a, b))
    both = [name for name in rows_a if name in rows_b]
    if not measures or not both:
        rule = f"an evaluation of {', '.join(rows_a)} by {', '.join(a.measures)}"
        problem = f"has no such {'row' if measures else 'measure'}"
        raise SpecError("OUT_B", output_b, rule, problem)
    by_measure = {}
    for measure in measures:
        gains = [query_differences(rows_b[name], rows_a[name], measure) for name in both]
        p_values = holm(randomisation_p(np.stack(gains)).tolist())
        by_measure[measure] = [
            Difference(name, measure, rows_a[name].means[measure], rows_b[name].means[measure], p)
            for name, p in zip(both, p_values, strict=True)
        ]
    unmatched = [name for name in rows_a if name not in both], [n for n in rows_b if n not in both]
    return Comparison((output_a, output_b), (a, b), by_measure, unmatched)


def compare_pairs(
    output_a: str, output_b: str, pairs: Sequence[Sequence[str]]
) -> tuple[list[PlannedComparison], str]:
    """Compares any rows of two evaluations in the main metric of the first.

    Args:
        pairs: Names of a row of the first evaluation and of a row of the second. The p values are
            corrected over them.

    Returns:
        The comparisons, and the name of the metric.

    Raises:
        SpecError: An evaluation, a row or the metric is missing, or the judged queries differ.
    """
    a, b = _read(output_a, output_b)
    if a.headline not in b.measures:
        raise SpecError("OUT_B", output_b, f"an evaluation by {a.headline}")
    rows = []
    for pair in pairs:
        for name, evaluation in zip(pair, (a, b), strict=True):
            names = [row.name for row in evaluation.results]
            if name not in names:
                raise SpecError.unknown_name("--rows", name, names)
        rows.append((a.row(pair[0]), b.row(pair[1])))
    return compare_rows(rows, a.headline), a.headline


def _read(output_a: str, output_b: str) -> tuple[Evaluation, Evaluation]:
    a, b = read_results(output_a, "OUT_A"), read_results(output_b, "OUT_B")
    if a.judgments != b.judgments:
        rule = f"an evaluation on the judged queries of {output_a} ({a.benchmark})"
        raise SpecError("OUT_B", output_b, rule, f"has other judged queries ({b.benchmark})")
    return a, b
