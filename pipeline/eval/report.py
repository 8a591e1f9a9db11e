"""Tables of an evaluation, and what it says in words."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.eval.grounding import Grounding
from pipeline.eval.results import BM25, COSTS, FULL, KEPT, OSR, Evaluation, Result, Standing


def table(evaluation: Evaluation) -> list[list[str]]:
    """Returns the rows as cells, the header first.

    `pareto` is * where no row has more for fewer bytes of vectors, `pareto all` for fewer bytes of
    everything stored.
    """
    header = ["representation", "method", "K", "score", *evaluation.measures]
    header += ["retention", "p", "against", "p BM25", "p random"]
    header += [OSR, "used", "Gini", "pareto", "pareto all"]
    header += ["vectors/item", "B/item", "B/item all", "queries/s", "ms", "ms p95"]
    rows = [
        [
            result.representation,
            method(result),
            budget(result),
            result.label,
            *(f"{value:.4f}" for value in result.means.values()),
            share(standing.retention),
            p_value(standing.p_reference),
            "-" if standing.p_reference is None else standing.reference,
            p_value(standing.p_bm25),
            p_value(standing.p_random),
            *first_diagnostics(result),
            "*" if standing.pareto else "",
            "*" if standing.pareto_all else "",
            *sizes(result),
            f"{result.queries_per_second:,.1f}",
            f"{result.median_ms:.2f}",
            f"{result.p95_ms:.2f}",
        ]
        for result, standing in zip(evaluation.results, evaluation.standings, strict=True)
    ]
    return [header, *rows]


def method(result: Result) -> str:
    """The method, with the number of seeds that it stands for, if more than one."""
    return (
        f"{result.method} ({len(result.seeds)} seeds)" if len(result.seeds) > 1 else result.method
    )


def budget(result: Result) -> str:
    """The number of vectors that a method keeps, or their share."""
    if result.num_vectors is not None:
        return str(result.num_vectors)
    if result.is_compressed:
        return str(result.budget)
    return "all" if result.method == FULL else "-"


def spread(result: Result, name: str) -> str:
    """How far the seeds of a row lie apart in a measure or in OSR; empty without seeds."""
    deviation = result.spread(name)
    return "" if deviation is None else f"±{deviation:.3f}"


def first_diagnostics(result: Result) -> list[str]:
    """The diagnostics of the first table: OSR, the share of vectors in use, Gini."""
    numbers = diagnostics(result)
    return [decimal(numbers[OSR]), share(numbers["used"]), decimal(numbers["gini"])]


def diagnostics(result: Result) -> dict[str, float | None]:
    """Every diagnostic number of a row, as `metrics.csv` calls it; None where it has none."""
    retention, diagnosis = result.retention, result.diagnosis
    names = ("used", "used_relevant", "gini", "cv", "similarity_mean")
    return {
        OSR: retention and retention.mean,
        f"{OSR} ratio of means": retention and retention.ratio_of_means,
        f"{OSR} pairs": retention and retention.num_pairs,
        f"{OSR} left out": retention and retention.num_left_out,
        **{name: diagnosis and getattr(diagnosis, name) for name in names},
        **{name: result.grounding.get(name) for name in (*Grounding._fields, "phrases")},
    }


#: The columns of the report's second table, with what `metrics.csv` calls them.
SECOND = {
    "OSR, mean of ratios": OSR,
    "OSR, ratio of means": f"{OSR} ratio of means",
    "pairs": f"{OSR} pairs",
    "left out": f"{OSR} left out",
    "used": "used",
    "used, relevant": "used_relevant",
    "Gini": "gini",
    "CV": "cv",
    "similarity": "similarity_mean",
}
#: And further ones where phrases were grounded.
GROUNDED = {"BoxMass": "box_mass", "RegionHit": "region_hit", "CoverageIoU": "coverage_iou"}


def second_columns(evaluation: Evaluation) -> dict[str, str]:
    """The columns of the report's second table."""
    return SECOND | (GROUNDED if any(r.grounding for r in evaluation.results) else {})


def second_diagnostics(result: Result, columns: dict[str, str]) -> list[str]:
    """The cells of a row in the report's second table."""
    numbers = diagnostics(result)
    cells = []
    for name in columns.values():
        value = numbers[name]
        if name.startswith("used") or name in GROUNDED.values():
            cells.append(share(value))
        elif name == "cv":
            cells.append("-" if value is None else f"{value:.1f}")
        else:
            cells.append(str(value) if isinstance(value, int) else decimal(value))
    return cells


def decimal(value: float | None) -> str:
    """A number to three digits.

    >>> decimal(0.9756), decimal(None)
    ('0.976', '-')
    """
    return "-" if value is None else f"{value:.3f}"


def sizes(result: Result) -> list[str]:
    """Vectors, bytes of the vectors and of everything, per item; none for BM25."""
    if result.method == BM25:
        return ["-"] * 3
    sizes = f"{result.vector_bytes:,.0f}", f"{result.all_bytes:,.0f}"
    return [f"{result.vectors_per_item:.1f}", *sizes]


def size_parts(result: Result) -> list[str]:
    """Returns bytes per item of vectors, assignments, positions and their sum; none for BM25."""
    if result.method == BM25:
        return ["-"] * 5
    parts = [result.vector_bytes, result.assignment_bytes, result.position_bytes, result.all_bytes]
    more = share(result.all_bytes / result.vector_bytes - 1 if result.vector_bytes else None)
    return [*(f"{number:,.0f}" for number in parts), more]


def share(value: float | None) -> str:
    """A share in percent.

    >>> share(0.9756), share(None)
    ('97.6 %', '-')
    """
    return "-" if value is None else f"{100 * value:.1f} %"


def p_value(p: float | None) -> str:
    """A p value to three digits.

    >>> p_value(0.0302), p_value(0.0001), p_value(None)
    ('0.030', '<0.001', '-')
    """
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def p_equals(p: float) -> str:
    """A p value in a sentence.

    >>> p_equals(0.0302), p_equals(0.0001)
    ('p = 0.030', 'p < 0.001')
    """
    return f"p = {p_value(p)}".replace("= <", "< ")


def against_bm25(standing: Standing) -> str:
    """Says how a row that is below BM25 compares with it; empty for one that is not below."""
    if not standing.below_bm25:
        return ""
    verdict = "loses to BM25" if standing.loses_to_bm25 else "below BM25, not significantly"
    return f"{verdict} ({p_equals(standing.p_bm25)})"


def explained(measure: str) -> str:
    """Explains a measure by its name; empty for one that is not explained here.

    >>> explained("RR@10"), explained("P@5"), explained("Bpref")
    ('1 / rank of the first relevant document of the first 10 results; 0 without one', \
'share of the first 5 results that are relevant', '')
    """
    name, _, cutoff = measure.partition("@")
    name, _, settings = name.partition("(")
    results = f"the first {cutoff} results" if cutoff else "the results"
    gain = "of a grade g it is 2^g - 1" if "exp-log2" in settings else "a grade is its gain"
    sentences = {
        "nDCG": f"gain of the relevant documents among {results}, discounted by log2(rank + 1), as"
        f" a share of the best possible; {gain}",
        "R": f"share of the relevant documents that are among {results}",
        "RR": f"1 / rank of the first relevant document of {results}; 0 without one",
        "AP": f"mean precision at the ranks of the relevant documents of {results}",
        "P": f"share of {results} that are relevant",
        "Success": f"1 if a relevant document is among {results}, else 0",
    }
    return sentences.get(name, "")


def fitting(result: Result) -> str:
    """Says what a row's compressor or codec was fitted on; empty if nothing was."""
    fitted = result.fitted
    if not fitted:
        return ""
    if fitted["num_items"] is None:
        return "items of the index; which ones was not recorded"
    number, evaluated = fitted["num_items"], fitted["evaluated"]
    items = f"{number:,} item{'s' * (number != 1)}"
    those = "all" if evaluated == number else f"{evaluated:,}" if evaluated else "none"
    origin = fitted["origin"]
    if not origin:
        return f"{items} of the index, {those} of them evaluated"
    source = origin.get("source", origin)
    place = source.get("path") or source.get("index") or "the index"
    where = f" where {source['where']}" if source.get("where") else ""
    return f"{items} of a separate sample ({place}{where}), {those} of them evaluated"


def fittings(results: Sequence[Result]) -> dict[str, list[str]]:
    """Returns the representations that were fitted, by what they were fitted on."""
    found: dict[str, list[str]] = {}
    for result in results:
        names = found.setdefault(fitting(result), [])
        if result.representation not in names:
            names.append(result.representation)
    found.pop("", None)
    return found


def summary(evaluation: Evaluation) -> Iterator[str]:
    """What the table says, in sentences."""
    measure, results = evaluation.headline, evaluation.results
    best = evaluation.best(results)
    yield f"Best quality: {best.name}, {measure} {evaluation.quality(best):.4f}."

    full = evaluation.best([result for result in results if result.method == FULL])
    frugal = evaluation.frugal(results)
    if frugal is not None:
        kept = share(evaluation.quality(frugal) / (evaluation.quality(full) or 1))
        parts = [
            f"{getattr(frugal, size):,.0f} of {getattr(full, size):,.0f} bytes per item"
            f" ({share(getattr(frugal, size) / max(1.0, getattr(full, size)))}) {of}"
            for size, of in (("vector_bytes", "of vectors"), ("all_bytes", "of everything stored"))
        ]
        yield (
            f"Cheapest with at least {100 * KEPT:.0f} % of the quality of the full tokens "
            f"({full.name}, {evaluation.quality(full):.4f}): {frugal.name}, "
            f"{evaluation.quality(frugal):.4f} ({kept}) with {' and '.join(parts)}."
        )
    yield from _bm25_sentence(evaluation)
    for on, names in fittings([r for r in results if r.fitted.get("evaluated", 0) != 0]).items():
        yield f"Fitted on {on}: {', '.join(names)}."


def _bm25_sentence(evaluation: Evaluation) -> Iterator[str]:
    """How many rows are significantly better or worse than BM25, with the names of the worse."""
    bm25 = next((result for result in evaluation.results if result.method == BM25), None)
    if bm25 is None:
        return
    better, worse, open_ = [], [], []
    for result, standing in zip(evaluation.results, evaluation.standings, strict=True):
        if result is bm25:
            continue
        if not standing.differs_from_bm25:
            open_.append(result)
        elif standing.below_bm25:
            worse.append(f"{result.name} ({p_equals(standing.p_bm25)})")
        else:
            better.append(result)
    parts = [f"{len(better)} significantly better"] * bool(better)
    parts += [f"{len(open_)} not significantly different"] * bool(open_)
    parts += [f"{len(worse)} significantly worse: {', '.join(worse)}"] * bool(worse)
    number = len(evaluation.results) - 1
    others = f" The other {number} row{'s' * (number > 1)} against it: {', '.join(parts)}."
    yield f"BM25 reaches {evaluation.quality(bm25):.4f}." + (others if parts else "")


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Cells as plain text: columns of numbers to the right, others to the left.

    >>> print(aligned([["method", "K"], ["hpool", "8"], ["samer", "16"]]))
    method   K
    hpool    8
    samer   16
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [any(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    header, *rows = cells
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def metrics_csv(evaluation: Evaluation) -> str:
    """The rows as CSV, numbers unrounded."""
    plain = ("representation", "method", "num_vectors")
    stands = ("retention", "reference", "p_reference", "p_bm25", "p_random")
    stands += ("pareto", "pareto_all")
    rows = [
        [
            *(getattr(result, name) for name in plain),
            result.label,
            *result.means.values(),
            *(getattr(standing, name) for name in stands),
            *(getattr(result, name) for name in COSTS),
            result.budget.ratio,
            *diagnostics(result).values(),
            *(result.fitted.get(name) for name in ("num_items", "evaluated")),
            len(result.seeds) or None,
            *(result.spread(name) for name in (*evaluation.measures, OSR)),
        ]
        for result, standing in zip(evaluation.results, evaluation.standings, strict=True)
    ]
    spreads = [f"{name} sd" for name in (*evaluation.measures, OSR)]
    more = ["ratio", *diagnostics(evaluation.results[0]), "fitted_on", "fitted_on_evaluated"]
    more += ["num_seeds", *spreads]
    return as_csv([[*plain, "score", *evaluation.measures, *stands, *COSTS, *more], *rows])


def per_query_csv(evaluation: Evaluation) -> str:
    """Each measure as CSV, a row for each run and query."""
    rows = [
        [result.name, query_id, *values.values()]
        for result in evaluation.results
        for query_id, values in result.values.items()
    ]
    return as_csv([["run", "query_id", *evaluation.measures], *rows])


def of_kind(evaluation: Evaluation, result: Result, kind: str) -> tuple[float, float | None]:
    """The headline measure and the score retention of a row on the queries of one kind."""
    query_ids = evaluation.kinds[kind]
    quality = sum(evaluation.value(result.name, q) for q in query_ids) / len(query_ids)
    retention = result.diagnosis and result.diagnosis.retention(query_ids)
    return quality, retention and retention.mean


def kinds_csv(evaluation: Evaluation) -> str:
    """Late rows by kind of the relevant documents as CSV, numbers unrounded."""
    rows = [
        [result.name, kind, len(query_ids), *of_kind(evaluation, result, kind)]
        for result in evaluation.results
        if result.score == "late"
        for kind, query_ids in evaluation.kinds.items()
    ]
    return as_csv([["row", "kind", "num_queries", evaluation.headline, OSR], *rows])


def of_category(evaluation: Evaluation, result: Result, query_ids: Sequence[str]) -> float:
    """Returns the mean of the headline measure of a row over some queries."""
    return sum(result.values[q][evaluation.headline] for q in query_ids) / len(query_ids)


def categories_csv(evaluation: Evaluation) -> str:
    """Every row by category of the queries as CSV, numbers unrounded."""
    rows = [
        [result.name, field, name, len(ids), of_category(evaluation, result, ids)]
        for field, groups in evaluation.categories.items()
        for result in evaluation.results
        for name, ids in groups.items()
    ]
    return as_csv([["row", "field", "category", "num_queries", evaluation.headline], *rows])


def as_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows, the header first, as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
