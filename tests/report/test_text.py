"""Tables as text."""

from pipeline.report.tables import table
from pipeline.report.text import aligned, markdown


def test_aligned_and_markdown(evaluation):
    cells = table(evaluation)
    lines = aligned(cells).splitlines()
    assert [line.split() for line in lines[1:]] == [" ".join(row).split() for row in cells[1:]]
    assert len({len(line) for line in lines}) == 1  # the last column is right-aligned
    assert markdown(cells).splitlines()[1] == "| " + " | ".join(["---"] * len(cells[0])) + " |"
