"""Numbers of evaluations in the units of papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from examples.papers.tables.plan import FULL, OTHER_ROWS, RELATIVE, Cell
from examples.papers.tables.spec import MEASURE, REPRESENTATION, SCORE
from pipeline.config import SpecError
from pipeline.eval.metrics import MDR
from pipeline.eval.report.tables import GROUNDING_COLUMNS
from pipeline.eval.results import Evaluation, Result, read_results
from pipeline.eval.significance import bootstrap_means, percentile_interval

#: nDCG with gains 2^grade - 1 instead of grades.
EXPONENTIAL = "nDCG(dcg='exp-log2')@"
#: Number of bootstrap samples of an interval.
NUM_SAMPLES = 2000

#: Numbers of a row that are not metrics, by name.
OTHER: Mapping[str, Callable[[Result], float | None]] = {
    "score retention": lambda row: row.retention.ratio_of_means if row.retention else None,
    "vectors": lambda row: row.vectors_per_item,
    "bytes": lambda row: row.vector_bytes,
    "kilobytes": lambda row: row.vector_bytes / 1e3,
    "GB per million": lambda row: row.vector_bytes * 1e6 / 1e9,
    "10^12 MaxSim operations": lambda row: row.maxsim_ops / 1e12,
    "queries/s": lambda row: row.queries_per_second,
    "seconds": lambda row: len(row.values) / row.queries_per_second,
    "ms per query": lambda row: row.median_ms,
    "million parameters": lambda row: row.rerank["parameters"] / 1e6 if row.rerank else None,
    "CV": lambda row: row.diagnosis.cv if row.diagnosis else None,
    "Gini": lambda row: row.diagnosis.gini if row.diagnosis else None,
}


def read_evaluation(output: str) -> Evaluation:
    """Reads the results of an evaluation."""
    return read_results(output, "evaluation")


def cell_value(
    cells: Sequence[Cell], percent: bool, read: Callable[[str], Evaluation] = read_evaluation
) -> float | None:
    """Returns the mean number of the origins of a cell, or None without origins."""
    values = [_value(read(cell.output), cell.selection, percent) for cell in cells]
    return math.fsum(values) / len(values) if values else None


def cell_interval(
    cells: Sequence[Cell], percent: bool, read: Callable[[str], Evaluation] = read_evaluation
) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of a cell, or None without a mean over queries.

    The queries of each origin are resampled.
    """
    samples = [
        _samples(read(cell.output), cell.selection, number) for number, cell in enumerate(cells)
    ]
    known = [means_S for means_S in samples if means_S is not None]
    if not known or len(known) < len(samples):
        return None
    is_relative = cells[0].selection[MEASURE].startswith(RELATIVE)
    low, high = percentile_interval(np.mean(known, axis=0))
    scale = 100 if percent or is_relative else 1
    return scale * low, scale * high


def _samples(evaluation: Evaluation, selection: Mapping[str, str], seed: int) -> np.ndarray | None:
    score, measure = selection.get(SCORE, "maxsim"), selection[MEASURE]
    name = measure.removeprefix(RELATIVE)
    row = find_row(evaluation, selection.get(REPRESENTATION, ""), score)
    if name == MDR or any(name not in values for values in row.values.values()):
        return None
    means_S = _means(row, name, seed)
    if measure == name:
        return means_S
    full_S = _means(find_row(evaluation, FULL, score), name, seed)
    return np.divide(means_S, full_S, out=np.ones_like(means_S), where=full_S > 0)


def _means(row: Result, name: str, seed: int) -> np.ndarray:
    values_Q = np.array([values[name] for values in row.values.values()])
    return bootstrap_means(values_Q, NUM_SAMPLES, seed)


def other_gain(measure: str) -> str:
    """Returns nDCG with the other gain of graded judgments, or a measure unchanged.

    >>> other_gain("nDCG@5"), other_gain("relative nDCG(dcg='exp-log2')@5"), other_gain("R@5")
    ("nDCG(dcg='exp-log2')@5", 'relative nDCG@5', 'R@5')
    """
    if EXPONENTIAL in measure:
        return measure.replace(EXPONENTIAL, "nDCG@")
    return measure.replace("nDCG@", EXPONENTIAL)


def other_gain_value(
    cells: Sequence[Cell], percent: bool, read: Callable[[str], Evaluation] = read_evaluation
) -> float | None:
    """Returns the number of a cell with the other gain of nDCG, or None for other measures."""
    others = [
        Cell(output, {**selection, MEASURE: other_gain(selection[MEASURE])})
        for output, selection in cells
    ]
    if list(cells) == others:
        return None
    try:
        return cell_value(others, percent, read)
    except SpecError:  # the evaluation was made without it
        return None


def _value(evaluation: Evaluation, selection: Mapping[str, str], percent: bool) -> float:
    score = selection.get(SCORE, "maxsim")
    row = find_row(evaluation, selection.get(REPRESENTATION, ""), score)
    measure = selection[MEASURE]
    if measure.startswith(RELATIVE):
        name = measure.removeprefix(RELATIVE)
        full = _metric(find_row(evaluation, FULL, score), name)
        return 100 * _metric(row, name) / full if full else math.nan
    if measure in OTHER:
        value = OTHER[measure](row)
        return math.nan if value is None else value
    return _metric(row, measure) * (100 if percent else 1)


def _metric(row: Result, name: str) -> float:
    grounding = {
        title: row.grounding[key] for title, key in GROUNDING_COLUMNS.items() if row.grounding
    }
    metrics = {**row.means, **grounding}
    if name not in metrics:
        raise SpecError.unknown_name(MEASURE, name, [*metrics, *OTHER])
    return metrics[name]


def find_row(evaluation: Evaluation, representation: str, score: str) -> Result:
    """Returns the row of a representation under a score."""
    for row in evaluation.results:
        names = {row.representation, *row.seeds}
        if row.score == score and (not representation or representation in names):
            return row
    known = [
        row.name if row.score in OTHER_ROWS else f"{row.representation}.{row.score}"
        for row in evaluation.results
    ]
    raise SpecError.unknown_name("row", f"{representation}.{score}", known)
