"""Numbers of evaluations in the units of papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from examples.papers.tables.plan import FULL, OTHER_ROWS, RELATIVE, Cell
from examples.papers.tables.spec import MEASURE, REPRESENTATION, SCORE
from pipeline.config import SpecError
from pipeline.eval.report.tables import GROUNDING_COLUMNS
from pipeline.eval.results import Evaluation, Result, read_results

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
