"""Table of pooled evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.eval.pooled import retention_p_values
from pipeline.eval.report.tables import budget
from pipeline.eval.report.text import Table, decimal, p_value
from pipeline.eval.results import OSR, Evaluation
from pipeline.eval.views import maxsim_rows


def table(evaluation: Evaluation, against: Sequence[str]) -> Table:
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
