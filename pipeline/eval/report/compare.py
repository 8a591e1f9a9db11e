"""Tables of a comparison of two evaluations."""

from __future__ import annotations

from pipeline.eval.compare import Comparison
from pipeline.runtime.text import Table, p_value


def table(compared: Comparison) -> Table:
    """Formats the headline metric of all common rows."""
    rows = [
        [row.name, f"{row.a:.4f}", f"{row.b:.4f}", f"{row.change:+.4f}", p_value(row.p)]
        for row in compared.differences[compared.headline]
    ]
    return Table([["row", f"{compared.headline} A", "B", "B - A", "p"], *rows])


def full_table(compared: Comparison) -> Table:
    """Returns all metrics of all rows; the mean of a missing row is empty."""
    rows = Table([["row", "measure", "a", "b", "difference", "p"]])
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
