"""Tables as text."""

import csv
import io

from pipeline.eval.report.tables import table
from pipeline.runtime.text import Table


def test_text_and_markdown(evaluation):
    cells = table(evaluation)
    lines = cells.text().splitlines()
    assert [line.split() for line in lines[1:]] == [" ".join(row).split() for row in cells[1:]]
    assert len({len(line) for line in lines}) == 1  # the last column is right-aligned
    assert cells.markdown().splitlines()[1] == "| " + " | ".join(["---"] * len(cells[0])) + " |"


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
