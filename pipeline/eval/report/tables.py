"""Tables of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from pipeline.eval.pooled import retention_p_values
from pipeline.eval.relevance_maps import GroundingMetrics
from pipeline.eval.results import (
    ALPHA,
    BM25,
    COSTS,
    FULL,
    OSR,
    Evaluation,
    PlannedComparison,
    Result,
    compare_rows,
)
from pipeline.eval.views import CandidatesScan, candidates_scans, line_name, maxsim_rows
from pipeline.runtime.text import Table, decimal, p_value, percentage, tex


def table(evaluation: Evaluation) -> Table:
    """Formats the rows.

    The column `pareto` is * if no other row has better quality with at most as many bytes of
    vectors. The column `pareto all` counts all stored bytes instead.
    """
    header = ["representation", "method", "K", "score", *evaluation.measures]
    header += ["retention", "p", "against", "p BM25", "p random"]
    header += [OSR, "used", "Gini", "pareto", "pareto all"]
    header += ["vectors/item", "B/item", "B/item all", "MaxSim ops", "queries/s", "ms", "ms p95"]
    rows = [
        [
            result.representation,
            method(result),
            budget(result),
            result.label,
            *(f"{value:.4f}" for value in result.means.values()),
            percentage(comparison.retention),
            p_value(comparison.p_reference),
            "-" if comparison.p_reference is None else comparison.reference,
            p_value(comparison.p_bm25),
            p_value(comparison.p_random),
            *summary_diagnostics(result),
            "*" if comparison.pareto else "",
            "*" if comparison.pareto_all else "",
            *sizes(result),
            f"{result.maxsim_ops:.3g}" if result.maxsim_ops else "-",
            f"{result.queries_per_second:,.1f}",
            f"{result.median_ms:.2f}",
            f"{result.p95_ms:.2f}",
        ]
        for result, comparison in zip(evaluation.results, evaluation.row_comparisons, strict=True)
    ]
    return Table([header, *rows])


def comparisons_table(evaluation: Evaluation) -> Table:
    """Formats the planned comparisons of an evaluation."""
    return pairs_table(evaluation.planned_comparisons, evaluation.headline)


def pairs_table(comparisons: Sequence[PlannedComparison], measure: str) -> Table:
    """Formats comparisons of pairs of rows."""
    header = ["row", "against", f"{measure} difference", "95 % interval", "p"]
    rows = [
        [
            planned.row,
            planned.other,
            f"{planned.difference:+.4f}",
            f"[{planned.low:+.4f}, {planned.high:+.4f}]",
            p_value(planned.p),
        ]
        for planned in comparisons
    ]
    return Table([header, *rows])


def paper_csv(evaluation: Evaluation) -> str:
    """Returns the rows of `paper_table` as CSV, with unrounded numbers."""
    columns = {
        "row": [result.name for result in evaluation.results],
        "method": [line_name(evaluation, result) for result in evaluation.results],
        "vectors_per_item": [result.vectors_per_item for result in evaluation.results],
        "vector_bytes": [result.vector_bytes for result in evaluation.results],
    }
    for name in evaluation.measures:
        columns[name] = [result.means[name] for result in evaluation.results]
        if name in evaluation.intervals:
            columns[f"{name} low"], columns[f"{name} high"] = evaluation.intervals[name].T.tolist()
    better = [" ".join(evaluation.better_than[result.name]) for result in evaluation.results]
    columns["better_than"] = better
    return Table([list(columns), *zip(*columns.values(), strict=True)]).csv()


def paper_table(evaluation: Evaluation) -> str:
    """Returns all rows in LaTeX, with intervals of all metrics and marks of significance."""
    marks = _marks(evaluation)
    columns = []
    for measure in evaluation.measures:
        cells = [f"{result.means[measure]:.3f}" for result in evaluation.results]
        if measure == evaluation.headline:
            better = [evaluation.better_than[result.name] for result in evaluation.results]
            signs = ["".join(marks[name] for name in names) for names in better]
            cells = [f"{c}$^{{{s}}}$" if s else c for c, s in zip(cells, signs, strict=True)]
        if measure in evaluation.intervals:
            intervals = evaluation.intervals[measure]
            ends = (rf" {{\scriptsize [{low:.3f}, {high:.3f}]}}" for low, high in intervals)
            cells = [f"{cell}{end}" for cell, end in zip(cells, ends, strict=True)]
        columns.append(cells)
    has_scores = len({result.label for result in evaluation.results if result.method != BM25}) > 1
    rows = [
        [
            f"${mark}$",
            tex(line_name(evaluation, result)),
            *[tex(result.label)] * has_scores,
            tex(budget(result)),
            *(tex(size) for size in sizes(result)[:2]),
            *cells,
        ]
        for mark, result, *cells in zip(marks.values(), evaluation.results, *columns, strict=True)
    ]
    header = ["", "method", *["score"] * has_scores, "$K$", "vectors/item", "bytes/item"]
    header += [tex(measure) for measure in evaluation.measures]
    family = "all rows, each compared with its reference and with BM25"
    if evaluation.planned_comparisons:
        family = "the planned comparisons"
    caption = (
        f"% {evaluation.benchmark}, {evaluation.num_queries} queries. Brackets: 95 % bootstrap "
        "intervals.\n"
        f"% Superscripts: significantly better than the row of this letter in "
        f"{evaluation.headline}\n"
        f"% (paired randomisation test, p < {ALPHA}, Holm's correction over {family}).\n"
        "% Requires \\usepackage{booktabs}.\n"
    )
    return caption + Table([header, *rows]).latex()


def _marks(evaluation: Evaluation) -> dict[str, str]:
    """Returns a letter for each row or, for more than 26 rows, a number in brackets."""
    names = [result.name for result in evaluation.results]
    if len(names) > len(ascii_lowercase):
        return {name: f"({number})" for number, name in enumerate(names, start=1)}
    return dict(zip(names, ascii_lowercase, strict=False))


def pooled_table(evaluation: Evaluation, against: Sequence[str]) -> Table:
    """Returns OSR (against other methods, see `retention_p_values`) and quality of MaxSim rows."""
    rows = maxsim_rows(evaluation)
    columns = retention_p_values(rows, against)
    header = ["method", "K", OSR, "OSR ±", *(f"p {name}" for name in against)]
    header += [evaluation.headline, f"{evaluation.headline} ±"]
    cells = [
        [
            row.method,
            budget(row),
            decimal(row.retention and row.retention.mean),
            decimal(row.spread(OSR)),
            *(p_value(p_values.get(row.name)) for p_values in columns),
            f"{evaluation.quality(row):.4f}",
            decimal(row.spread(evaluation.headline)),
        ]
        for row in rows
    ]
    return Table([header, *cells])


def candidates_table(evaluation: Evaluation) -> Table:
    """Formats the recall and the cost of candidate generators."""
    scans = candidates_scans(evaluation)
    depths = list(dict.fromkeys(key for scan in scans for key in _recalls(scan)))
    header = ["generator", "candidates", *depths, evaluation.headline, "exact", "p"]
    header += ["ms", "exact ms", "queries/s", "B/item of codes"]
    rows = [
        [
            scan.name,
            f"{number:,}",
            *(f"{row.candidates[depth]:.3f}" for depth in depths),
            f"{evaluation.quality(row):.4f}",
            f"{evaluation.quality(scan.exact):.4f}",
            p_value(evaluation.comparison(row).p_reference),
            f"{row.median_ms:.2f}",
            f"{scan.exact.median_ms:.2f}",
            f"{row.queries_per_second:,.1f}",
            f"{row.vector_bytes - scan.exact.vector_bytes:,.0f}",
        ]
        for scan in scans
        for number, row in scan.rows.items()
    ]
    return Table([header, *rows])


def rerank_table(evaluation: Evaluation) -> Table:
    """Formats the gain of rerankers over their first stage, with its interval, and their cost.

    The times are those of reranking only, and all queries were reranked in one batch.
    """
    measure, names = evaluation.headline, {row.name for row in evaluation.results}
    rows = [r for r in evaluation.results if r.rerank and r.first_stage in names]
    gains = compare_rows([(r, evaluation.row(r.first_stage)) for r in rows], measure)
    header = ["reranker", "first stage", "top", f"{measure} before", "after", "difference"]
    header += ["95 % interval", "p", "ms/query", "pairs/s", "requests/query", "unread"]
    cells = []
    for row, gain in zip(rows, gains, strict=True):
        cost, seconds = row.rerank, row.rerank["seconds"]
        num_queries = cost["queries"] / len(cost["rerankers"])
        cells.append(
            [
                row.name,
                row.first_stage,
                " + ".join(str(spec["top"]) for spec in cost["rerankers"]),
                f"{evaluation.quality(evaluation.row(row.first_stage)):.4f}",
                f"{evaluation.quality(row):.4f}",
                f"{gain.difference:+.4f}",
                f"[{gain.low:+.4f}, {gain.high:+.4f}]",
                p_value(gain.p),
                f"{1000 * seconds / num_queries:,.1f}",
                f"{cost['pairs'] / seconds:,.1f}",
                f"{cost['requests'] / num_queries:g}",
                f"{cost['unread']:,.0f}",
            ]
        )
    return Table([header, *cells])


def _recalls(scan: CandidatesScan) -> list[str]:
    first = next(iter(scan.rows.values()))
    return [name for name in first.candidates if name.startswith("recall@")]


def method(result: Result) -> str:
    """Returns the name of the method. If there are several seeds, their number is appended."""
    return (
        f"{result.method} ({len(result.seeds)} seeds)" if len(result.seeds) > 1 else result.method
    )


def budget(result: Result) -> str:
    """Returns the number or fraction of vectors per item of a row."""
    if result.num_vectors is not None:
        return str(result.num_vectors)
    if result.is_compressed:
        return str(result.budget)
    return "all" if result.method == FULL else "-"


def spread(result: Result, name: str) -> str:
    """Formats the standard deviation of a metric or the OSR over seeds, if there are any."""
    deviation = result.spread(name)
    return "" if deviation is None else f"±{deviation:.3f}"


def summary_diagnostics(result: Result) -> list[str]:
    """Formats the diagnostics of the main table: OSR, fraction of matched vectors, and Gini."""
    values = diagnostics(result)
    return [decimal(values[OSR]), percentage(values["used"]), decimal(values["gini"])]


def diagnostics(result: Result) -> dict[str, float | None]:
    """Returns all diagnostics of a row by their names in `metrics.csv`. Missing ones are None."""
    retention, diagnosis = result.retention, result.diagnosis
    names = ("used", "used_relevant", "gini", "cv", "similarity_mean")
    return {
        OSR: retention and retention.mean,
        f"{OSR} ratio of means": retention and retention.ratio_of_means,
        f"{OSR} pairs": retention and retention.num_pairs,
        f"{OSR} left out": retention and retention.num_left_out,
        **{name: getattr(diagnosis, name, None) for name in names},
        **{name: result.grounding.get(name) for name in (*GroundingMetrics._fields, "phrases")},
    }


#: Columns of the table of diagnostics, and their names in `metrics.csv`.
DIAGNOSTIC_COLUMNS = {
    "OSR, mean of ratios": OSR,
    "OSR, ratio of means": f"{OSR} ratio of means",
    "pairs": f"{OSR} pairs",
    "left out": f"{OSR} left out",
    "used": "used",
    "used, relevant pairs": "used_relevant",
    "Gini": "gini",
    "CV": "cv",
    "similarity": "similarity_mean",
}
#: Additional columns if grounding was measured.
GROUNDING_COLUMNS = {
    "BoxMass": "box_mass",
    "RegionHit": "region_hit",
    "CoverageIoU": "coverage_iou",
}


def diagnostic_columns(evaluation: Evaluation) -> dict[str, str]:
    """Returns the columns of the table of diagnostics, and their names in `metrics.csv`."""
    has_grounding = any(result.grounding for result in evaluation.results)
    return DIAGNOSTIC_COLUMNS | (GROUNDING_COLUMNS if has_grounding else {})


def diagnostic_cells(result: Result, columns: dict[str, str]) -> list[str]:
    """Returns the cells of a row in the table of diagnostics."""
    values = diagnostics(result)
    cells = []
    for name in columns.values():
        value = values[name]
        if name.startswith("used") or name in GROUNDING_COLUMNS.values():
            cells.append(percentage(value))
        elif name == "cv":
            cells.append("-" if value is None else f"{value:.1f}")
        else:
            cells.append(str(value) if isinstance(value, int) else decimal(value))
    return cells


def sizes(result: Result) -> list[str]:
    """Formats the vectors, their bytes and all stored bytes per item. BM25 has dashes instead."""
    if result.method == BM25:
        return ["-"] * 3
    sizes = f"{result.vector_bytes:,.0f}", f"{result.all_bytes:,.0f}"
    return [f"{result.vectors_per_item:.1f}", *sizes]


def size_parts(result: Result) -> list[str]:
    """Formats bytes per item of vectors, assignments and positions, their sum, and the overhead."""
    if result.method == BM25:
        return ["-"] * 5
    parts = [result.vector_bytes, result.assignment_bytes, result.position_bytes, result.all_bytes]
    overhead = result.all_bytes / result.vector_bytes - 1 if result.vector_bytes else None
    return [*(f"{number:,.0f}" for number in parts), percentage(overhead)]


def metrics_csv(evaluation: Evaluation) -> str:
    """Returns all rows as CSV, with unrounded numbers."""
    identity = ("representation", "method", "num_vectors")
    comparisons = [
        *("retention", "reference", "p_reference", "p_bm25", "p_random"),
        *("pareto", "pareto_all"),
    ]
    rows = [
        [
            *(getattr(result, name) for name in identity),
            result.label,
            *result.means.values(),
            *(getattr(comparison, name) for name in comparisons),
            *(getattr(result, name) for name in COSTS),
            result.budget.ratio,
            *diagnostics(result).values(),
            *(result.fit_sample.get(name) for name in ("num_items", "num_evaluated")),
            len(result.seeds) or None,
            *(result.spread(name) for name in (*evaluation.measures, OSR)),
        ]
        for result, comparison in zip(evaluation.results, evaluation.row_comparisons, strict=True)
    ]
    spreads = [f"{name} sd" for name in (*evaluation.measures, OSR)]
    others = ["ratio", *diagnostics(evaluation.results[0]), "fitted_on", "fitted_on_evaluated"]
    others += ["num_seeds", *spreads]
    header = [*identity, "score", *evaluation.measures, *comparisons, *COSTS, *others]
    return Table([header, *rows]).csv()


def per_query_csv(evaluation: Evaluation) -> str:
    """Returns all metrics as CSV, with one row per run and query."""
    rows = [
        [result.name, query_id, *values.values()]
        for result in evaluation.results
        for query_id, values in result.values.items()
    ]
    return Table([["run", "query_id", *evaluation.measures], *rows]).csv()


def document_category_metrics(
    evaluation: Evaluation, result: Result, category: str
) -> tuple[float, float | None]:
    """Returns headline metric and OSR of a row for the queries of one document category."""
    query_ids = evaluation.document_categories[category]
    quality = sum(evaluation.value(result.name, q) for q in query_ids) / len(query_ids)
    retention = None if result.diagnosis is None else result.diagnosis.retention(query_ids)
    return quality, retention and retention.mean


def document_categories_csv(evaluation: Evaluation) -> str:
    """Returns MaxSim rows by category of the relevant documents as CSV."""
    rows = [
        [
            result.name,
            category,
            len(query_ids),
            *document_category_metrics(evaluation, result, category),
        ]
        for result in evaluation.results
        if result.score == "maxsim"
        for category, query_ids in evaluation.document_categories.items()
    ]
    return Table([["row", "category", "num_queries", evaluation.headline, OSR], *rows]).csv()


def category_quality(evaluation: Evaluation, result: Result, query_ids: Sequence[str]) -> float:
    """Returns the mean headline metric of a row over some queries."""
    return sum(result.values[q][evaluation.headline] for q in query_ids) / len(query_ids)


def query_categories_csv(evaluation: Evaluation) -> str:
    """Returns all rows by category of the queries as CSV."""
    rows = [
        [result.name, field, name, len(ids), category_quality(evaluation, result, ids)]
        for field, groups in evaluation.query_categories.items()
        for result in evaluation.results
        for name, ids in groups.items()
    ]
    header = ["row", "field", "category", "num_queries", evaluation.headline]
    return Table([header, *rows]).csv()
