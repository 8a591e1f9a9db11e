"""Tables as text."""

import csv
import io

from pipeline.runtime.text import Table


def test_csv_contains_no_formulas():
    """Texts get an apostrophe, numbers do not, and none becomes another text."""
    formulas = [
        "=1+1",
        "+1+cmd",
        "-2+3",
        "@SUM(A1)",
        "\t=1",
        "\n=1",
        "\uff1d1",
        "'=1",
        "-aB3",
    ]
    others = ["a=b", "it's", "'quoted'", "", "-", "-0.5", "+1e-3", "1,200", "a\nb", "p < 0.001"]
    numbers = [-1.5, 3, None]
    rows = list(csv.reader(io.StringIO(Table([formulas, others, numbers]).csv(), newline="")))
    assert rows == [[f"'{cell}" for cell in formulas], others, ["-1.5", "3", ""]]
