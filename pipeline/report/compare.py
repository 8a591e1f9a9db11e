"""Tables of a comparison of two evaluations."""

from __future__ import annotations

from pipeline.eval.compare import Comparison
from pipeline.report.text import p_value


def table(compared: Comparison) -> list[list[str]]:
    """Formats the headline metric of all common rows as table cells.

    The first row is the header.
    """
    rows = [
        [row.name, f"{row.a:.4f}", f"{row.b:.4f}", f"{row.change:+.4f}", p_value(row.p)]
        for row in compared.differences[compared.headline]
    ]
    return [["row", f"{compared.headline} A", "B", "B - A", "p"], *rows]


def csv_rows(compared: Comparison) -> list[list[object]]:
    """Formats all metrics of all rows as CSV rows. The first row is the header.

    If only one of the evaluations contains a row, the mean of the other one is empty.
    """
    rows: list[list[object]] = [["row", "measure", "a", "b", "difference", "p"]]
    for differences in compared.differences.values():
        rows += [[d.name, d.measure, d.a, d.b, d.change, d.p] for d in differences]
    for side, (evaluation, names) in enumerate(
        zip(compared.evaluations, compared.unmatched, strict=True)
    ):
        for name in names:
            for measure in compared.differences:
                mean = evaluation.row(name).means[measure]
                rows.append([name, measure, *([mean, ""] if side == 0 else ["", mean]), "", ""])
    return rows
