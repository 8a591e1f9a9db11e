"""Reading order of text columns and tables."""

import numpy as np
import pypdfium2
import pytest

from pipeline.data.decode.layout import TextLine, is_right_to_left, reading_order
from pipeline.data.decode.pdf import page_words
from tests.pdfs import Page, pdf

PROSE = """The board met in the spring and heard
the report of its auditors on the year
that had passed. It found that income
had grown by 4 per cent, while costs
rose by half of that. The members gave
their thanks to the staff and to those
who had left. They then turned to plans
for the coming year and to the budget."""


def column(x: float, text: str, top: float = 280, step: float = 12) -> list:
    """Returns the lines of a column as words of a page; empty lines leave a gap."""
    rows = enumerate(text.strip().split("\n"))
    return [(x, top - step * row, line.strip()) for row, line in rows if line.strip()]


def read(*columns: list) -> list[str]:
    """Returns the lines of a page that is rows_of_cells column by column."""
    words = [word for column in columns for word in column]
    document = pypdfium2.PdfDocument(pdf(Page(words, size=(700, 300))))
    text, spans, boxes = page_words(document[0])
    assert len(spans) == len(boxes) == len(text.split())
    assert [text[start:end] for start, end in spans] == text.split()
    return [line for line in text.split("\n") if line]


def test_numeric_table():
    rows = ["Year Total Share", "1996 32,762 5.6%", "1997 33,071 n/a", "1998 33,344 7.0%"]
    names, totals, shares = zip(*map(str.split, rows), strict=True)
    columns = [column(x, "\n".join(c)) for x, c in ((10, names), (200, totals), (300, shares))]
    assert read(*columns) == rows
    assert read(*columns[::-1]) == rows
    title = column(10, "Table 1. Pupils of public schools, by year, in thousands", top=295)
    assert read(*columns, title) == [title[0][2], *rows]


def test_table_of_short_texts():
    rows = [
        ("Ada Berg", "Physics", "Oslo"),
        ("Ole Dahl", "Law", "Bergen"),
        ("Per Lie", "Art", "Moss"),
    ]
    columns = zip((10, 200, 400), zip(*rows, strict=True), strict=True)
    assert read(*(column(x, "\n".join(cells)) for x, cells in columns)) == [*map(" ".join, rows)]


def test_table_with_long_labels_and_empty_cells():
    labels = """
        Net cash provided by operating activities
        Effect of exchange rates on cash
        Net increase in cash and cash equivalents
        Cash at the end of the year"""
    lines = read(
        column(10, labels), column(320, "1,204\n\n88\n1,310"), column(420, "997\n12\n\n1,009")
    )
    assert lines == [
        "Net cash provided by operating activities 1,204 997",
        "Effect of exchange rates on cash 12",
        "Net increase in cash and cash equivalents 88",
        "Cash at the end of the year 1,310 1,009",
    ]


@pytest.mark.parametrize("by_cell", [False, True])
def test_multi_line_cells(by_cell):
    cells = [
        ("Income", "All that a household\nreceives in a year"),
        ("Debt\nburden", "Monthly payments as a\nshare of the income\nof that month"),
        ("Age", "In years at the\ntime of the interview"),
    ]
    row_tops = [280, 248, 204]
    rows_of_cells = [
        [column(x, text, top) for x, text in zip((10, 150), texts, strict=True)]
        for texts, top in zip(cells, row_tops, strict=True)
    ]
    groups = rows_of_cells if by_cell else zip(*rows_of_cells, strict=True)
    lines = read(*(cell for group in groups for cell in group))
    rows = [" ".join(" ".join(texts).split()) for texts in cells]
    assert " ".join(lines) == " ".join(rows)
    assert by_cell or lines == rows


@pytest.mark.parametrize(
    "right",
    [
        PROSE,
        "\n".join(PROSE.split("\n")[4:]),  # shorter
        PROSE.replace("that had passed", "2011, 2012, 13"),
        "News\n\n" + PROSE,
    ],
)
def test_text_columns_with_equal_baselines(right):
    left = "Notes\n\n" + PROSE if right.startswith("News") else PROSE
    lines = [line.strip() for text in (left, right) for line in text.split("\n") if line.strip()]
    assert read(column(10, left), column(300, right)) == lines


def test_adjacent_paragraphs_are_columns():
    left, right = ("\n\n".join([PROSE[:148]] * 3) for _ in range(2))
    lines = [line for text in (left, right) for line in text.split("\n") if line]
    assert read(column(10, left), column(300, right)) == lines


def test_adjacent_addresses_are_columns():
    left, right = "Ada Berg\nMain Street\nOslo", "Ole Dahl\nHigh Street\nBergen"
    assert read(column(10, left), column(300, right)) == [*left.split("\n"), *right.split("\n")]


def test_right_to_left():
    def block(x: float, *texts: str) -> list[TextLine]:
        boxes = (np.array([x, 0.1 * i, x + 0.3, 0.1 * i + 0.05]) for i in range(len(texts)))
        return [TextLine(box, t, t) for box, t in zip(boxes, texts, strict=True)]

    left, right = block(0.0, "left"), block(0.6, "right")
    assert reading_order([left, right]) == [[["left"]], [["right"]]]
    assert reading_order([left, right], from_right=True) == [[["right"]], [["left"]]]
    left, right = block(0.0, "12", "13"), block(0.6, "a", "b")
    assert reading_order([left, right], from_right=True) == [[["a", "12"], ["b", "13"]]]
    assert is_right_to_left("שלום 2020") and not is_right_to_left("hello שלום")
